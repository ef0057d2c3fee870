"""Sample calls: Fourier transforms."""

from __future__ import annotations

import torch

from tests.rules.making import call, sample, samples

aten = torch.ops.aten

samples(
    "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft",
)(lambda t: call(t.real(4, 12)), lambda t: call(t.real(4, 12, 6), 8, 1, "ortho"))
samples(
    "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn "
    "fft_ihfftn",
)(lambda t: call(t.real(12, 4, 6), None, [-2, -1]), lambda t: call(t.real(4, 12, 6), [8, 4], [0, -1], "ortho"))
sample(aten.fft_fft2.default, lambda t: call(t.real(12, 4, 6)))
samples(aten.fft_fftn.default, aten.fft_rfftn.default)(
    lambda t: call(t.real(12, 4, 6), [4, 4]), lambda t: call(t.real(4, 6))
)
sample(
    aten.stft.center,
    lambda t: call(t.real(12, 16), 4, 2, 4, t.positive(4), return_complex=True),
    lambda t: call(t.real(16), 4, 2, 4, t.positive(4), False, return_complex=True),
)
sample(aten.stft.default, lambda t: call(t.real(12, 16), 4, 2, 4, t.positive(4), return_complex=True))
sample(aten.istft.default, lambda t: call(torch.view_as_complex(t.real(12, 3, 9, 2)), 4, 2, 4, torch.ones(4).double()))
sample(aten.resolve_conj.default, lambda t: call(torch.view_as_complex(t.real(4, 12, 2)).conj()))
sample(aten.view_as_real.default, lambda t: call(torch.view_as_complex(t.real(4, 12, 2))))
sample(aten.view_as_complex.default, lambda t: call(t.real(4, 12, 2)))
samples(aten.real.default, aten.imag.default)(lambda t: call(torch.view_as_complex(t.real(4, 12, 2))))
sample(aten.complex.default, lambda t: call(t.real(4, 12), t.real(12)))
sample(aten.polar.default, lambda t: call(t.positive(4, 12), t.real(12)))
