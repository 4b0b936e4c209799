"""A target with one GPU runs its engine beside its replica, on the GPU of its bundle; Ray is only told of GPUs here.

Run as a program, this module tells Ray of a GPU, places an actor with the options and bundles of `deployments.app`, and
starts in it our engine for one worker, with what a CPU needs in place of a GPU's worker. It prints one JSON line.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.settings import load_settings
from deployments import compat
from deployments.app import catalog, target_options
from peagle.vllm.engine_settings import engine_kwargs

pytestmark = [pytest.mark.service, pytest.mark.long]


def seen(worker: Any) -> tuple[int, str]:
    """Process of an engine's worker, and the GPU that it sees."""
    import os

    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]


class Replica:
    async def answer(self, target_dir: str, share: float) -> dict[str, Any]:
        from ray.serve.llm import LLMConfig  # not in the program that starts Ray: they take long to import
        from vllm import SamplingParams, TokensPrompt

        small = {"max_model_len": 64, "max_num_seqs": 1, "enforce_eager": True}
        config = LLMConfig(
            model_loading_config={"model_id": "m", "model_source": target_dir},
            engine_kwargs=engine_kwargs(None, None, dtype="float32", on_cpu=True, extra=small),
            placement_group_config={"bundle_per_worker": {"GPU": share}},
        )
        compat.download_nothing(config)
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for a function that a worker is to call
        engine = compat.engine_class(False, lambda *_: ((), None))(config)
        await engine.start()
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        async for output in engine._engine_client.generate(TokensPrompt(prompt_token_ids=[1, 2, 3]), params, "r"):
            found = output
        workers = await engine._engine_client.collective_rpc(seen)
        engines = engine._engine_client.engine_core.resources.engine_manager.processes
        return {
            "gpu": os.environ["CUDA_VISIBLE_DEVICES"],
            "worker_gpus": [gpu for _, gpu in workers],
            "num_processes": len({os.getpid(), *(one.pid for one in engines), *(pid for pid, _ in workers)}),
            "num_tokens": len(found.outputs[0].token_ids),
            "left_for_others": ray.available_resources().get("GPU", 0.0),
            "executor": engine._engine_client.vllm_config.parallel_config.distributed_executor_backend,
        }


def main(target_dir: str, share: float) -> None:
    args = {"model": {"id": "m", "source": target_dir}, "target": {"bundle": {"GPU": share}}}
    options = target_options(load_settings(args, catalog(), {}))
    ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
    group = ray.util.placement_group(options["placement_group_bundles"], options["placement_group_strategy"])
    place = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    actor = ray.remote(Replica).options(**options["ray_actor_options"], scheduling_strategy=place)
    print(json.dumps(ray.get(actor.remote().answer.remote(target_dir, share), timeout=240)))


def test_scheduler_and_worker_are_a_process_each_which_sees_the_gpu_of_the_bundle(target_dir: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": "local", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"  # some clusters have it; the replica knows its own
    environment["RAY_worker_niceness"] = "0"  # by Ray's default of 15 the other tests starve it
    command = [sys.executable, "-m", __name__, str(target_dir), "0.4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["worker_gpus"] == [found["gpu"]] != [""]
    assert found["num_processes"] == 3
    assert (found["executor"], found["num_tokens"]) == ("mp", 3)
    assert found["left_for_others"] == pytest.approx(1.6), "of two GPUs, the bundle's 0.4 taken"


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
