"""The Perfetto trace, parsed back: every event, on its track, at its nanosecond."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb2

from fullbore.ir import Action
from fullbore.timeline import Curve
from fullbore.view import Panel, perfetto
from fullbore.view.panel import BYTES


class Parsed:
    """A trace's tracks, and on each the slices and counter values."""

    def __init__(self, serialized: bytes) -> None:
        self.tracks, self.slices, self.counters = {}, defaultdict(list), defaultdict(list)
        under_way = defaultdict(list)
        for packet in pb2.Trace.FromString(serialized).packet:
            assert packet.trusted_packet_sequence_id
            if packet.HasField("track_descriptor"):
                assert packet.track_descriptor.uuid not in self.tracks
                self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
                continue
            event = packet.track_event
            assert event.track_uuid in self.tracks, "a track is described before its events"
            if event.type == event.TYPE_COUNTER:
                self.counters[event.track_uuid].append(
                    (packet.timestamp, event.double_counter_value)
                )
            elif event.type == event.TYPE_SLICE_BEGIN:
                under_way[event.track_uuid].append((packet.timestamp, event))
            else:
                assert event.type == event.TYPE_SLICE_END
                start, begin = under_way[event.track_uuid].pop()
                assert not under_way[event.track_uuid], "slices of a track never overlap"
                self.slices[event.track_uuid].append((start, packet.timestamp, begin))
        assert not any(under_way.values())

    def process_of(self, uuid: int) -> str:
        return self.tracks[self.tracks[uuid].parent_uuid].process.process_name

    def named(self, name: str) -> list[int]:
        return [uuid for uuid, track in self.tracks.items() if track.name == name]


def test_every_span_is_a_slice_on_its_track(simulated):
    panel = simulated("interleaved", virtual_stages=2, hop_s=0.125)
    parsed = Parsed(perfetto.render([panel]))
    seen = set()
    for uuid, slices in parsed.slices.items():
        lane = parsed.tracks[uuid].name
        for start, end, event in slices:
            action = Action.parse(event.name)
            notes = {note.name: note.int_value for note in event.debug_annotations}
            assert notes == {"stage": action.stage, "microbatch": action.microbatch}
            assert list(event.categories) == [action.kind.name]
            assert lane == ("communication" if action.kind.name[1:] else "compute")
            seen.add((parsed.process_of(uuid), event.name, start, end))
    wanted = {
        (f"rank {span.rank}", str(span.action), round(span.start_s * 1e9), round(span.end_s * 1e9))
        for span in panel.timeline
    }
    assert seen == wanted
    assert sum(map(len, parsed.slices.values())) == len(panel.timeline)


def test_a_process_a_rank_with_its_tracks_beneath(simulated):
    parsed = Parsed(perfetto.render([simulated(hop_s=0.1)]))
    processes = [track.process for track in parsed.tracks.values() if track.HasField("process")]
    assert [process.process_name for process in processes] == [f"rank {r}" for r in range(4)]
    assert [process.pid for process in processes] == [1, 2, 3, 4]
    assert len(parsed.named("compute")) == 4
    assert {parsed.process_of(uuid) for uuid in parsed.named("communication")} == {
        f"rank {r}" for r in range(4)
    }


def test_live_activations_are_a_counter(simulated):
    panel = simulated()
    parsed = Parsed(perfetto.render([panel]))
    for rank, uuid in enumerate(parsed.named("live activations")):
        curve = panel.curves[rank]
        assert parsed.tracks[uuid].counter.unit_name == panel.curve_unit
        assert parsed.counters[uuid] == [
            (round(time_s * 1e9), value)
            for time_s, value in zip(curve.times_s.tolist(), curve.values.tolist(), strict=True)
        ]
    assert max(value for _, value in parsed.counters[parsed.named("live activations")[0]]) == 4.0


def test_bytes_are_counted_as_bytes(drawn):
    curve = Curve(times_s=np.array([0.0]), values=np.array([7.0]))
    panel = Panel(
        title="p",
        timeline=drawn((0, "0F0", 0, 1)),
        curves=(curve,),
        curve_name="saved tensors",
        curve_unit=BYTES,
    )
    parsed = Parsed(perfetto.render([panel]))
    (uuid,) = parsed.named("saved tensors")
    counter = parsed.tracks[uuid].counter
    assert counter.unit == counter.UNIT_SIZE_BYTES


def test_messages_under_way_together_get_rows(drawn):
    timeline = drawn(
        (0, "0F0", 0, 1), (0, "0SEND_F0", 1, 4), (0, "0SEND_F1", 2, 3), (0, "0SEND_F2", 3, 5)
    )
    parsed = Parsed(perfetto.render([Panel(title="p", timeline=timeline)]))
    rows = [[s[2].name for s in parsed.slices[uuid]] for uuid in parsed.named("communication")]
    assert rows == [["0SEND_F0"], ["0SEND_F1", "0SEND_F2"]]


def test_several_panels_have_processes_of_their_own(simulated):
    panels = [simulated(title="predicted"), simulated(title="measured", scale=1.1)]
    parsed = Parsed(perfetto.render(panels))
    processes = [track.process for track in parsed.tracks.values() if track.HasField("process")]
    assert processes[5].process_name == "measured: rank 1"
    assert len({process.pid for process in processes}) == 8


def test_times_before_the_step_are_its_beginning(drawn):
    timeline = drawn((0, "0F0", -1e-9, 1e-9))
    parsed = Parsed(perfetto.render([Panel(title="p", timeline=timeline)]))
    ((start, end, _),) = next(iter(parsed.slices.values()))
    assert (start, end) == (0, 1)
