"""Each link between two ranks: how soon does a message arrive, how much passes, and is it the link or a rank?

In a round every rank talks with one other rank, and in the next one with another: so a link that is slow is told from
a rank, or a machine, that is slow on all its links. What looks slow is measured again while nobody else talks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median, quantiles
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.jobs.doctor.findings import ExaminedRanks, Finding, Level
from trainer.messages import format_seconds

_ROUNDS = 15  # at most: all pairs of 16 ranks
_PINGS = 20  # messages there and back, of which the fastest counts
_TRIAL, _LOAD, _DEVICE_LOAD = 2**16, 2**22, 2**27  # bytes: of a first message; then if that went well; on a GPU
_QUICK = 0.05  # seconds that the first message may take
_LOADS = 3  # large messages, of which the fastest counts
_SLOWER = 3.0  # times as slow as it should be: less is chance
_SLOWER_BY_PROCESSOR = 10.0  # the same inside a machine without GPUs, where only processors copy, which others use too
_BELOW_RATE = 10.0  # times as slow as the network's own rate, of which a single connection rarely gets all
_SOCKET_RATE = 1.25e9  # bytes a second that one connection through a processor may reach at most, for a sure verdict
_LATE, _LATER_BY = 10.0, 1e-3  # times as late as it should be, and seconds at least
_AGAIN, _TIMES_AGAIN = 16, 3  # pairs that are measured again, at most; how often, as long as they look slow

Pair = tuple[int, int]  # ranks, or machines, the smaller number first


@dataclass(frozen=True)
class Link:
    """One direction between two ranks."""

    sender: int
    receiver: int
    latency_s: float
    bytes_per_s: float

    @property
    def pair(self) -> Pair:
        """Its two ranks, whatever the direction."""
        return min(self.sender, self.receiver), max(self.sender, self.receiver)


class LinkSpeed(NamedTuple):
    """What a link does, or should do."""

    latency_s: float
    bytes_per_s: float


def pair_rounds(ranks: int, most: int = _ROUNDS) -> list[list[Pair]]:
    """Pairs that talk at the same time, round by round: a tournament, or so many rounds of it, evenly chosen."""
    seats = list(range(ranks)) + [-1] * (ranks % 2)  # who meets -1 pauses
    every = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        every.append(sorted((min(pair), max(pair)) for pair in pairs if -1 not in pair))
        seats = [seats[0], seats[-1], *seats[1:-1]]  # the first keeps its seat, the others move on
    count = min(most, len(every))
    return [every[index * len(every) // count] for index in range(count)]


def time_links(site: ExaminedRanks, plan: Sequence[Sequence[Pair]]) -> list[Link]:
    """Collective: the links of these rounds, in both directions, on all ranks."""
    links = []
    for pairs in plan:
        site.begin()
        for first, second in pairs:
            if site.world.rank in (first, second):
                links.append(_time_link(site, first, second))
                links.append(_time_link(site, second, first))
    # all ranks; each hears what every sender has measured
    answers = site.world.all_gather_values([link for link in links if link.sender == site.world.rank])
    return [link for answer in answers for link in answer]


def _time_link(site: ExaminedRanks, sender: int, receiver: int) -> Link:
    """The two ranks: one direction of their link. Only the sender's times count."""
    sends, peer = site.world.rank == sender, receiver if site.world.rank == sender else sender
    small = torch.zeros(2, device=site.device)  # float32, (2,): 8 bytes
    latency = min(_ping(site, sends, peer, small) for _ in range(_PINGS)) / 2
    trial = _send(site, sends, peer, _TRIAL)
    # both know by a message how much comes next; it travels on the CPU
    size = torch.tensor([_TRIAL if trial > _QUICK else _LOAD if site.device.type == "cpu" else _DEVICE_LOAD])
    dist.send(size, peer) if sends else dist.recv(size, peer)
    best = trial
    if size.item() > _TRIAL:
        best = min(_send(site, sends, peer, int(size)) for _ in range(_LOADS))
    return Link(sender, receiver, latency, int(size) / max(best - latency, 1e-9))


def _ping(site: ExaminedRanks, sends: bool, peer: int, message: Tensor) -> float:
    """Seconds of a small message there and back."""
    began = perf_counter()
    for outward in (sends, not sends):
        _transfer(message, peer, outward)
        site.synchronize()
    return perf_counter() - began


def _send(site: ExaminedRanks, sends: bool, peer: int, size: int) -> float:
    """Seconds until so many bytes are there, and a word of it is back."""
    load = torch.ones(size // 4, device=site.device)  # float32, (bytes / 4,): zeros need not be in memory yet
    site.synchronize()
    began = perf_counter()
    _transfer(load, peer, sends)
    site.synchronize()
    word = torch.zeros(1)
    dist.recv(word, peer) if sends else dist.send(word, peer)
    return perf_counter() - began


def _transfer(tensor: Tensor, peer: int, sends: bool) -> None:
    """One direction. As a batch of one: NCCL then uses the connections of the group and makes none for each pair."""
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if sends else dist.irecv, tensor, peer)]):
        work.wait()


def median_link(links: Collection[Link]) -> LinkSpeed:
    """The middle one of these links."""
    return LinkSpeed(median(link.latency_s for link in links), median(link.bytes_per_s for link in links))


def good_link(links: Collection[Link]) -> LinkSpeed:
    """What a quarter of these links reach: among few ranks, one bad rank makes half of all links bad."""
    latency, rate = (
        quantiles(values, n=4, method="inclusive")
        for values in zip(*[(link.latency_s, link.bytes_per_s) for link in links], strict=True)
    )
    return LinkSpeed(latency[0], rate[-1])


class Expectations:
    """What each link should do: as the others of its kind, as last time, and as the network says of itself."""

    def __init__(
        self, site: ExaminedRanks, links: Sequence[Link], before: Mapping[Pair, LinkSpeed], network_rate: float
    ) -> None:
        """before: by (sender, receiver). network_rate: bytes a second, of the slowest machine's adapter."""
        self._site, self._before = site, before
        kinds = {across: [link for link in links if self.across(link.pair) == across] for across in (False, True)}
        self._good = {across: good_link(same) for across, same in kinds.items() if same}
        most = _SOCKET_RATE if site.device.type == "cpu" else inf
        self._least = min(network_rate, most) / _BELOW_RATE if network_rate < inf else 0.0

    def across(self, pair: Pair) -> bool:
        """Does the link join two machines?"""
        return self._site.machines[pair[0]] != self._site.machines[pair[1]]

    def complaint(self, link: Link) -> str:
        """What is wrong with a link, in words; empty if nothing is."""
        known = [(self._good[self.across(link.pair)], "a good link of its kind")]
        if (last := self._before.get((link.sender, link.receiver))) is not None:
            known.insert(0, (last, "last time it"))
        for expected, whose in known:
            if link.bytes_per_s * self._slower(link.pair) < expected.bytes_per_s:
                return f"passes {format_rate(link.bytes_per_s)}; {whose} passed {format_rate(expected.bytes_per_s)}"
            if link.latency_s > max(_LATE * expected.latency_s, expected.latency_s + _LATER_BY):
                return f"takes {format_seconds(link.latency_s)}; {whose} took {format_seconds(expected.latency_s)}"
        if self.across(link.pair) and link.bytes_per_s < self._least:
            least = format_rate(self._least)
            return f"passes {format_rate(link.bytes_per_s)}; an adapter of its rate passes {least} at least"
        return ""

    def _slower(self, pair: Pair) -> float:
        by_processor = self._site.device.type == "cpu" and not self.across(pair)
        return _SLOWER_BY_PROCESSOR if by_processor else _SLOWER

    def level(self, pair: Pair) -> Level:
        """How sure a complaint is: in one machine some GPUs may be joined by NVLink and others by PCIe, as built."""
        return "error" if self.across(pair) or pair in self._before or self._site.device.type == "cpu" else "warning"


def format_rate(bytes_per_s: float) -> str:
    """Bytes a second, for people."""
    if bytes_per_s == inf:
        return "-"
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"


def remeasure_slow_links(site: ExaminedRanks, links: Sequence[Link], expectations: Expectations) -> list[Link]:
    """Collective: the same links; those that looked slow are measured again alone, and the best result counts."""
    best = {(link.sender, link.receiver): link for link in links}
    for _ in range(_TIMES_AGAIN):
        suspects = sorted({link.pair for link in best.values() if expectations.complaint(link)})[:_AGAIN]
        for link in time_links(site, [[pair] for pair in suspects]):
            before = best[link.sender, link.receiver]
            latency, rate = min(before.latency_s, link.latency_s), max(before.bytes_per_s, link.bytes_per_s)
            best[link.sender, link.receiver] = Link(link.sender, link.receiver, latency, rate)
    return list(best.values())


def attribute_bad_links(bad: Collection[Pair], measured: Collection[Pair]) -> tuple[list[int], list[Pair]]:
    """Whose fault bad links are: nodes all of whose links (two or more) are bad; and the other bad links by themselves.

    Two nodes with one link between them and others to nobody else are told apart by nothing: then it is the link.
    """
    left, nodes = set(bad), []
    links_of = {node: {pair for pair in measured if node in pair} for pair in measured for node in pair}
    for node in sorted(links_of):
        if len(links_of[node]) > 1 and links_of[node] <= set(bad) and len(links_of[node] & left) > 1:
            nodes.append(node)
            left -= links_of[node]
    return nodes, sorted(left)


def judge_links(site: ExaminedRanks, links: Sequence[Link], expectations: Expectations) -> list[Finding]:
    """A finding for each bad link, or for the rank or the machine at one end of all of them."""
    complaints: dict[Pair, str] = {}
    for link in links:
        if complaint := expectations.complaint(link):
            complaints.setdefault(link.pair, complaint)
    machine_of = [list(dict.fromkeys(site.machines)).index(machine) for machine in site.machines]
    pairs = {link.pair for link in links}

    # between machines first: if all links of two machines are bad, it is the cable and not the ranks
    between: dict[Pair, list[Pair]] = {}
    for pair in sorted(pairs):
        near, far = sorted(machine_of[rank] for rank in pair)
        if near != far:
            between.setdefault((near, far), []).append(pair)
    bad = [ends for ends, those in between.items() if all(pair in complaints for pair in those)]
    machines, cables = attribute_bad_links(bad, between)
    findings, explained = [], set()
    for machine in machines:
        rank = machine_of.index(machine)
        those = [pair for ends in between if machine in ends for pair in between[ends]]
        sentence = f"and the other ranks of its machine: every link to other machines {complaints[those[0]]}"
        findings.append(site.finding("error", sentence, rank))
        explained |= set(those)
    for ends in cables:
        explained |= set(between[ends])
        findings.append(_about_link(site, between[ends][0], complaints, "error", len(between[ends])))

    # then the ranks, by what is left
    ranks, single = attribute_bad_links(complaints.keys() - explained, pairs - explained)
    for rank in ranks:
        first = next(pair for pair in sorted(complaints) if rank in pair)
        sentence = f"is slow on all of its links: the first one {complaints[first]}"
        findings.append(site.finding(expectations.level(first), sentence, rank))
    return findings + [_about_link(site, pair, complaints, expectations.level(pair)) for pair in single]


def _about_link(
    site: ExaminedRanks, pair: Pair, complaints: Mapping[Pair, str], level: Level, count: int = 1
) -> Finding:
    """A finding about one link; count: how many like it join the same two machines."""
    first, second = pair
    others = f" (and the {count - 1} others between these machines)" if count > 1 else ""
    sentence = f"the link between {site.where(first)} and {site.where(second)}{others} {complaints[pair]}"
    return Finding(level, sentence, second, site.hosts[second])
