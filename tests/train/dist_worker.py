"""One rank of test_dist.py: joins, shards a layer, talks to the others, prints what it saw."""

import json
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from train import dist as subject
from train.settings import ProcessConfig


def main(num_shard: int, policy_group_size: int) -> None:
    """Runs every helper once and prints the results as one JSON line."""
    processes = ProcessConfig(num_shard=num_shard, device="cpu", process_group_timeout_s=60.0)
    context = subject.start_processes(processes, policy_group_size)
    rank = context.rank
    torch.manual_seed(0)
    layer = nn.Linear(4, 8, bias=False)
    fully_shard(layer, mesh=context.mesh)
    scores = torch.tensor([float(rank), 2.0 * rank])
    seen = {
        "rank": rank,
        "mesh": dict(zip(context.mesh.mesh_dim_names, context.mesh.shape, strict=True)),
        "local_rows": layer.weight.to_local().shape[0],
        "group_id": context.policy_group_id,
        "all": subject.gather_from_all(context, f"r{rank}"),
        "group": subject.gather_in_policy_group(context, rank),
        "main": subject.broadcast_from_main(context, "from 0" if context.is_main else None),
        "group_mean": subject.mean_over_policy_group(context, scores).tolist(),
        "scores": scores.tolist(),
        "no_error": subject.first_error(context, None),
        "error": subject.first_error(context, ValueError("bad") if rank == 1 else None),
        "turn": subject.run_in_turns(context, 1, lambda: rank * 10),
        "turn_error": turn_error(context),
    }
    subject.barrier(context)
    subject.stop_processes()
    print(json.dumps(seen))  # noqa: T201


def turn_error(context: subject.ProcessContext) -> str:
    """The text of the error that this rank sees when the last rank's turn fails."""

    def work() -> None:
        if context.rank == context.world_size - 1:
            raise OSError("disk is gone")

    try:
        subject.run_in_turns(context, 2, work)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
