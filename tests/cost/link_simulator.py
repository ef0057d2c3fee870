"""A small simulator of links: messages flow through them at once, and share each in a fair way.

At any moment every message has the rate that max-min fairness gives it: all rates grow together, until a link is full;
those who use it stay at that, and the others grow on (Bertsekas and Gallager, "Data Networks", 6.5.2). When a message
has ended, the rates are found anew. What a message takes beside that is the latency of its way.

    links = Links()
    a, b = links.add(10.0), links.add(10.0)            bytes per second
    links.seconds([(a, b), (a,)], [5.0, 5.0])          both take a: 1 s

`Machine` has the links of a description of a device (shardc.cost.device): a rank sends and receives over one of its own
inside of its node, over a network card's to other nodes, and the ranks of a pod share what leads out of it. On rails a
card reaches cards of its own number alone; what is for others goes to the rank of that number first, in the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardc.machine.device import Device

Paths = NDArray[np.int64]  # [messages, links of the longest way], -1: no link


class Links:
    def __init__(self) -> None:
        self.rates: list[float] = []

    def add(self, rate: float) -> int:
        self.rates.append(rate)
        return len(self.rates) - 1

    def seconds(self, paths: Sequence[Sequence[int]] | Paths, nbytes: Sequence[float] | NDArray[np.float64]) -> float:
        """Until all of the messages have arrived, which begin together."""
        return float(self.ends(paths, nbytes).max())

    def ends(
        self, paths: Sequence[Sequence[int]] | Paths, nbytes: Sequence[float] | NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Seconds after which each message has arrived."""
        ways = paths if isinstance(paths, np.ndarray) else padded(paths)
        left = np.array(nbytes, dtype=np.float64)
        ends, now = np.zeros(len(left)), 0.0
        under_way = np.flatnonzero(left > 0)
        while len(under_way):
            rates = self.fair(ways[under_way])
            took = (left[under_way] / rates).min()
            now += took
            left[under_way] -= rates * took
            arrived = left[under_way] <= 1e-9 * np.asarray(nbytes)[under_way]
            ends[under_way[arrived]] = now
            under_way = under_way[~arrived]
        return ends

    def fair(self, paths: Paths) -> NDArray[np.float64]:
        """The rate of each message: max-min fair."""
        room = np.array(self.rates)
        rates = np.zeros(len(paths))
        growing = np.arange(len(paths))
        while len(growing):
            ways = paths[growing]
            users = np.bincount(ways[ways >= 0], minlength=len(room))
            share = np.where(users > 0, room / np.maximum(users, 1), np.inf)
            least = share.min()
            full = np.append(share <= least * (1 + 1e-9), False)  # the last: no link
            stays = full[ways].any(1)
            rates[growing[stays]] = least
            used = ways[stays]
            room = np.maximum(room - least * np.bincount(used[used >= 0], minlength=len(room)), 0.0)
            growing = growing[~stays]
        return rates


def padded(paths: Sequence[Sequence[int]]) -> Paths:
    longest = max(map(len, paths))
    return np.array([[*p, *[-1] * (longest - len(p))] for p in paths], dtype=np.int64)


class Machine:
    """Of so many ranks. rails: see above."""

    def __init__(self, device: Device, ranks: int, *, rails: bool = False) -> None:
        self.device, self.ranks, self.rails, self.links = device, ranks, rails, Links()
        share = device.reaches.link

        def ends(rate: float, count: int) -> tuple[Paths, Paths]:
            made = np.array([self.links.add(rate) for _ in range(2 * count)])
            return made[:count], made[count:]

        within, between = device.within, device.between
        self._out, self._in = ends(within.bandwidth * (within.reaches or share), ranks)
        self._card_out, self._card_in = ends(between.bandwidth * (between.reaches or share), ranks)
        self._pairs = (within.peer or 0.0) * (within.reaches or share)
        self._pair_links: dict[tuple[int, int], int] = {}
        if device.pod and device.beyond:
            beyond, pod = device.beyond, device.pod
            pods = -(-ranks // pod)
            self._up, self._down = ends(beyond.bandwidth * (beyond.reaches or share) * min(pod, ranks), pods)

    def level(self, senders: Paths, receivers: Paths) -> Paths:
        """0: inside of a node, 1: of a pod, 2: beyond."""
        level = (senders // self.device.node != receivers // self.device.node).astype(np.int64)
        if self.device.pod:
            level += senders // self.device.pod != receivers // self.device.pod
        return level

    def paths(self, senders: Paths, receivers: Paths) -> Paths:
        d, level = self.device, self.level(senders, receivers)
        found = np.full((len(senders), 6), -1, dtype=np.int64)
        inside = level == 0
        found[inside, 0], found[inside, 1] = self._out[senders[inside]], self._in[receivers[inside]]
        if self._pairs:
            for i in np.flatnonzero(inside):
                pair = int(senders[i]), int(receivers[i])
                if pair not in self._pair_links:
                    self._pair_links[pair] = self.links.add(self._pairs)
                found[i, 2] = self._pair_links[pair]
        out = level > 0
        cards = senders.copy()
        if self.rails:
            cards = senders // d.node * d.node + receivers % d.node
            moved = out & (cards != senders)
            found[moved, 0], found[moved, 1] = self._out[senders[moved]], self._in[cards[moved]]
        found[out, 2], found[out, 3] = self._card_out[cards[out]], self._card_in[receivers[out]]
        if d.pod:
            far = level == 2
            found[far, 4], found[far, 5] = self._up[senders[far] // d.pod], self._down[receivers[far] // d.pod]
        return found

    def latency(self, senders: Paths, receivers: Paths) -> float:
        """Of the longest way."""
        links = [self.device.within, self.device.between, self.device.beyond]
        link = links[int(self.level(senders, receivers).max())]
        assert link is not None
        return link.latency

    # --- collectives of groups that all do the same at once

    def at_once(self, groups: Sequence[Sequence[int]], messages: Callable[[Sequence[int]], Iterator[Message]]) -> float:
        """One round: the messages that `messages` gives for a group, of all groups."""
        every = [np.concatenate(x) for x in zip(*(m for g in groups for m in messages(g)), strict=True)]
        senders, receivers = every[0].astype(np.int64), every[1].astype(np.int64)
        return self.latency(senders, receivers) + self.links.seconds(self.paths(senders, receivers), every[2])

    def all_to_all(self, groups: Sequence[Sequence[int]], nbytes: float) -> float:
        """Everybody sends to everybody else of its group."""

        def messages(group: Sequence[int]) -> Iterator[Message]:
            ranks, n = np.array(group), len(group)
            a, b = np.divmod(np.arange(n * n), n)
            other = a != b
            yield ranks[a[other]], ranks[b[other]], np.full(n * (n - 1), nbytes / n)

        return self.at_once(groups, messages)

    def ring(self, groups: Sequence[Sequence[int]], nbytes: float) -> float:
        """all_gather or reduce_scatter: as many rings as a group has ranks in a node, each of which leaves the node at
        another one. Parts follow each other around, so latency counts once for each rank.
        """
        node = self.device.node

        def orders(group: Sequence[int]) -> Iterator[NDArray[np.int64]]:
            ranks = np.array(sorted(group))
            near = int((ranks // node == ranks[0] // node).sum())
            for c in range(near):
                yield ranks.reshape(-1, near)[:, (np.arange(near) + c) % near].reshape(-1)

        def messages(group: Sequence[int]) -> Iterator[Message]:
            every, n = list(orders(group)), len(group)
            for order in every:
                yield order, np.roll(order, -1), np.full(n, nbytes / len(every) * (n - 1) / n)

        first = next(orders(groups[0]))
        level = self.level(first[:-1], first[1:])
        links = [self.device.within, self.device.between, self.device.beyond]
        latency = sum(link.latency for i in level if (link := links[int(i)]) is not None)
        return latency + self.at_once(groups, messages) - self.latency(first, np.roll(first, -1))

    def doubling(self, groups: Sequence[Sequence[int]], nbytes: float) -> float:
        """all_gather of a power of 2: in round j, what one has goes to the one whose number differs in bit j."""
        n, total = len(groups[0]), 0.0
        for j in range(n.bit_length() - 1):

            def messages(group: Sequence[int], j: int = j) -> Iterator[Message]:
                ranks = np.array(sorted(group))
                yield ranks, ranks[np.arange(n) ^ (1 << j)], np.full(n, nbytes / n * 2**j)

            total += self.at_once(groups, messages)
        return total


Message = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]  # senders, receivers, bytes
