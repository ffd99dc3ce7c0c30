"""Capture, replay, detection of moved memory, fallback and counters, on a fake backend."""

import logging

import pytest
import torch

from modeling.bagel.graph_capture import CaptureError, GraphCapture, StaleGraphError
from tests.fake_graph import FakeBackend


class Box:
    """A tensor that can be moved to new memory."""

    def __init__(self):
        self.value = torch.zeros(3)

    def add(self) -> None:
        self.value.add_(1)

    def watched(self) -> list[torch.Tensor]:
        return [self.value]


def captured():
    box, backend = Box(), FakeBackend()
    capture = GraphCapture(backend)
    return box, backend, capture, capture.capture(box.add, box.watched)


def test_capture_records_without_running_and_replay_runs():
    box, backend, capture, work = captured()
    assert box.value.tolist() == [0, 0, 0]
    for _ in range(3):
        work.replay()
    assert box.value.tolist() == [3, 3, 3]
    assert (backend.captures, capture.counters.captured, capture.counters.replayed) == (1, 1, 3)


def move(box: Box) -> None:
    """Gives the same tensor object other memory, as a weight that is freed and gathered again."""
    box.value.set_(box.value.clone())


def free(box: Box) -> None:
    box.value.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [move, free])
def test_replay_refuses_what_has_moved_or_was_freed(change):
    box, backend, _, work = captured()
    change(box)
    with pytest.raises(StaleGraphError, match="moved"):
        work.replay()
    assert backend.replays == 0


def test_run_records_anew_where_memory_moved():
    box, backend, capture, work = captured()
    old = box.value.view(3)
    box.value.set_(torch.full((3,), 5.0))
    work.run()
    assert box.value.tolist() == [6, 6, 6]
    assert old.tolist() == [0, 0, 0]
    assert (backend.captures, capture.counters.recaptured) == (2, 1)
    work.run()
    assert backend.captures == 2


def test_what_took_another_ones_place_is_seen_when_watched_anew():
    box, backend, capture, work = captured()
    work.watch_anew()
    work.run()
    old, box.value = box.value, torch.zeros(3)
    work.watch_anew()
    with pytest.raises(StaleGraphError, match="moved"):
        work.replay()
    work.run()
    assert (backend.captures, capture.counters.recaptured) == (2, 1)
    assert (old.tolist(), box.value.tolist()) == ([1, 1, 1], [1, 1, 1])


def test_a_refused_recapture_runs_nothing_and_can_be_tried_again():
    box, backend, capture, work = captured()
    move(box)
    backend.refuses = True
    with pytest.raises(CaptureError, match="operation not permitted"):
        work.run()
    assert box.value.tolist() == [0, 0, 0]
    assert (backend.replays, capture.counters.recaptured) == (0, 0)
    backend.refuses = False
    work.run()
    assert box.value.tolist() == [1, 1, 1]
    assert (capture.counters.captured, capture.counters.recaptured) == (1, 1)


def test_released_graph_is_not_replayed():
    _, backend, _, work = captured()
    work.release()
    with pytest.raises(StaleGraphError, match="released"):
        work.replay()
    assert backend.replays == 0


def test_without_backend_nothing_is_captured():
    capture = GraphCapture(None)
    assert not capture.is_available
    with pytest.raises(CaptureError, match="needs a GPU"):
        capture.capture(lambda: None, list)


def test_fallback_warns_once_for_each_reason(caplog):
    capture = GraphCapture(None)
    with caplog.at_level(logging.WARNING, logger="faster_r3"):
        for reason in ("a", "a", "b"):
            capture.fall_back(reason)
    assert [record.getMessage()[-1] for record in caplog.records] == ["a", "b"]
    assert capture.counters.fallen_back == 3
    assert capture.metrics()["graphs/fallen_back"] == 3.0
