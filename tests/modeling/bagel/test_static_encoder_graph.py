"""Encoders of pictures through a fake graph on a CPU: their eager bits, for every picture."""

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from modeling.autoencoder import AutoEncoder, VaeConfig
from modeling.bagel.bagel import Bagel
from modeling.bagel.config import ImageSize
from modeling.bagel.execution import Execution
from modeling.bagel.graph_capture import MAX_REFUSED, GraphCapture
from modeling.bagel.static_encoder_graph import EncoderGraphs
from tests.fake_graph import FakeBackend
from tests.tiny import move_weights, tiny_model

GRID, WIDE = ImageSize(3, 4), ImageSize(2, 5)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def patches_of(grid: ImageSize, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = 3 * tiny_model().config.vit.patch_size ** 2
    return torch.rand(grid.height * grid.width, size, generator=generator) * 2 - 1


def encode(graphs: EncoderGraphs, model: Bagel, patches: Tensor, grid: ImageSize) -> Tensor:
    return Execution(encoder_graphs=graphs).encode_vit(model, patches, grid)


def test_pictures_of_every_size_have_the_eager_bits():
    backend = FakeBackend()
    graphs, model = EncoderGraphs(GraphCapture(backend)), tiny_model()
    pictures = [(grid, patches_of(grid, seed)) for seed in range(4) for grid in (GRID, WIDE)]
    features = [encode(graphs, model, patches, grid) for grid, patches in pictures]
    # Compared at the end: no call may overwrite what an earlier one returned.
    for (grid, patches), found in zip(pictures, features, strict=True):
        assert torch.equal(found, model.encode_vit(patches, grid))
    assert (backend.captures, backend.replays) == (2, 6)


def test_as_many_patches_of_another_shape_are_another_kind():
    backend = FakeBackend()
    graphs, model = EncoderGraphs(GraphCapture(backend)), tiny_model()
    turned = ImageSize(GRID.width, GRID.height)
    for _ in range(3):
        for grid in (GRID, turned):
            patches = patches_of(grid, 1)
            found = encode(graphs, model, patches, grid)
            assert torch.equal(found, model.encode_vit(patches, grid))
    assert backend.captures == 2


def test_both_encoders_with_and_without_autocast():
    backend = FakeBackend()
    graphs, model = EncoderGraphs(GraphCapture(backend)), tiny_model()
    execution = Execution(encoder_graphs=graphs)
    autoencoder = AutoEncoder(VaeConfig(32, (1, 2), 1, 4, 3)).requires_grad_(False)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.rand(2, 3, 8, 6, generator=generator) * 2 - 1
        patches = patches_of(GRID, seed)
        assert torch.equal(encode(graphs, model, patches, GRID), model.encode_vit(patches, GRID))
        for is_cast in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
                latents = execution.encode_pictures(autoencoder, pixels)
                assert torch.equal(latents, autoencoder.encode(pixels))
    assert (backend.captures, backend.replays) == (3, 6)


def test_weights_that_moved_are_captured_anew_once_they_stay():
    backend = FakeBackend()
    graphs, model = EncoderGraphs(GraphCapture(backend)), copy.deepcopy(tiny_model())

    def see(seed: int) -> int:
        patches = patches_of(GRID, seed)
        found = encode(graphs, model, patches, GRID)
        assert torch.equal(found, model.encode_vit(patches, GRID))
        return backend.captures

    assert [see(seed) for seed in range(3)] == [0, 1, 1]
    lay_there = [weight.data for weight in model.parameters()]  # none goes back there
    move_weights(model)
    assert [see(seed) for seed in range(3)] == [1, 2, 2]
    assert lay_there


def test_refused_captures_leave_pictures_to_the_eager_path(caplog):
    backend = FakeBackend(refuses=True)
    graphs, model = EncoderGraphs(GraphCapture(backend)), tiny_model()
    with caplog.at_level(logging.WARNING, logger="faster_r3"):
        for seed in range(6):
            patches = patches_of(GRID, seed)
            found = encode(graphs, model, patches, GRID)
            assert torch.equal(found, model.encode_vit(patches, GRID))
    assert backend.refused == MAX_REFUSED and "picture encoders: operation" in caplog.text
    graphs.release()
    backend.refuses = False
    for seed in range(2):
        encode(graphs, model, patches_of(GRID, seed), GRID)
    assert (backend.captures, backend.replays) == (1, 1)
