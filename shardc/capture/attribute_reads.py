"""What forward reads of modules' attributes while it is captured: a program has their values of that moment.

`if self.training:` of one's own    the program has the branch of training; compare_eager.evaluates tells whether
                                    evaluating needs another program
`y * self.scale`                    a later `model.scale = 2.0` would change nothing: it is noticed
                                    (shardc.runtime.step.user_changes)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import nn

from shardc.capture.side_effects import Changes
from shardc.ir import source
from shardc.ir.program import Source

#: Values that are compared by what they are.
PLAIN = (bool, int, float, str, type(None))
#: Torch's own modules whose use of `self.training` no op of a program switches. Its other dropouts, batch norms,
#: recurrent layers and attention hand it to ops that `evaluate` switches (compare_eager.SWITCHED).
NOT_SWITCHED = (
    nn.RReLU,
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_OF_EVERY_MODULE = frozenset({*vars(nn.Module), *vars(nn.Module())})


@dataclass
class Reads:
    """training: the lines that read `.training`, but for what torch's own modules do with it. values: by module's name
    the plain attributes that were read, as they were.
    """

    training: dict[str, Source] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def set_too(self, changes: Changes) -> dict[str, Source]:
        """The numbers that forward reads and then sets to others, with the line that does; they are taken out of
        `values`, as every call of the model changes them.
        """
        found = {}
        for path, values in self.values.items():
            for name in [n for n in values if (f"{path}.{n}" if path else n) in changes.set]:
                full = f"{path}.{name}" if path else name
                if type(values.pop(name)) in (int, float):
                    found[full] = changes.set[full]
        return found


@contextmanager
def recorded(model: nn.Module, changes: Changes) -> Iterator[Reads]:
    """While open, records what is read of the model's modules. changes: what forward has written so far, whose values
    before do not count.
    """
    reads = Reads()
    names = {id(m): name for name, m in model.named_modules()}

    def read(self: nn.Module, name: str) -> Any:
        value = super(nn.Module, self).__getattribute__(name)
        if type(value) in PLAIN and (path := names.get(id(self))) is not None:
            if name == "training":
                frame = sys._getframe(1)
                if isinstance(self, NOT_SWITCHED) or source.is_users(frame.f_code.co_filename):
                    place = (
                        source.of_call() if isinstance(self, NOT_SWITCHED) else source.of_frame(frame, frame.f_lineno)
                    )
                    reads.training.setdefault(place.line or path, place)
            elif name not in _OF_EVERY_MODULE and (f"{path}.{name}" if path else name) not in changes.written:
                held = super(nn.Module, self).__getattribute__("__dict__")
                if name in held or any(vars(c).get(name) is value for c in type(self).__mro__ if name in vars(c)):
                    reads.values.setdefault(path, {}).setdefault(name, value)
        return value

    with mock.patch.object(nn.Module, "__getattribute__", read):
        yield reads
