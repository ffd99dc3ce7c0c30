"""The state of a turn: loaded in place, equal to what the eager path plans, moving on by itself."""

import torch

from modeling.bagel.attention import cache_read
from modeling.bagel.sampling import SamplingConfig
from modeling.bagel.text_turn import TurnProgram, TurnSource, TurnState
from tests.tiny import CPU, contexts

GREEDY = SamplingConfig(do_sample=False, temperature=1.0, top_k=0, top_p=1.0)
LENGTHS = [4, 7, 1, 2]


def grown():
    filled = contexts(4, capacity=32)
    filled.feed_text(filled.rows, [list(range(5, 5 + n)) for n in LENGTHS])
    filled.cache.next_rope = [9, 8, 7, 6]
    return filled


@torch.no_grad()
def test_loaded_state_is_what_the_eager_path_plans():
    cache, state = grown().cache, TurnState.zeros(2, CPU)
    addresses = {name: tensor.data_ptr() for name, tensor in vars(state).items()}
    types = {name: tensor.dtype for name, tensor in vars(state).items()}
    state.tokens.fill_(11)
    for rows in ([0, 2], [1, 3], [3, 0]):
        state.load(cache, rows)
        assert torch.equal(state.places, cache.append(rows, [1, 1], causal=True).runs[0].places)
        used = torch.tensor([cache.lengths[row] + 1 for row in rows], dtype=torch.int32)
        assert torch.equal(state.keys_used, used.long())
        planned = cache_read(rows, [1, 1], used, cache.capacity, causal=True)
        assert torch.equal(state.key_starts, planned.key_starts)
        assert state.rope_ids.tolist() == [cache.next_rope[row] for row in rows]
        assert state.tokens.tolist() == [11, 11]
        cache.advance(rows, [1, 2], [1, 3])
    assert {name: tensor.data_ptr() for name, tensor in vars(state).items()} == addresses
    assert {name: tensor.dtype for name, tensor in vars(state).items()} == types


@torch.no_grad()
def test_a_program_serves_other_rows_through_the_same_tensors():
    reference, static = grown(), grown()
    program = TurnProgram(2, GREEDY, CPU)
    watched = None
    for rows in ([0, 2], [1, 3], [2, 3]):
        program.load(TurnSource(static, static.weights(), torch.Generator()), rows)
        program.state.tokens.copy_(torch.tensor([21, 22]))
        tokens = [21, 22]
        for _ in range(3):
            hidden = reference.feed_text(rows, [[token] for token in tokens])
            tokens = reference.model.language_model.lm_head(hidden).argmax(dim=-1).tolist()
            program.run()
            static.cache.advance(rows, [1, 1], [1, 1])
            assert program.state.tokens.tolist() == program.state.drawn[0].tolist() == tokens
        addresses = [tensor.data_ptr() for tensor in program.watched()]
        watched = watched or addresses
        assert addresses == watched
    for state in vars(program.state).values():
        assert state.data_ptr() in watched
    for mine, theirs in zip(static.cache.keys, reference.cache.keys, strict=True):
        assert torch.equal(mine, theirs)
