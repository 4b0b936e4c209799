import json
import os
import subprocess
import sys

PROGRAM = """
import json, os, sys
from peagle.vllm import fork_server

def inner(pipe):
    pipe.send(("inner", os.environ.get("SET_LATE"), os.environ.get("SET_IN_CHILD"), os.getpid(), os.getppid()))

def outer(pipe):
    from vllm.utils.system_utils import get_mp_context
    import torch
    is_ready = "xmlrpc.client" in sys.modules and not torch.cuda._is_in_bad_fork()
    pipe.send(("outer", os.environ.get("SET_LATE"), os.environ.get("LEFT_OUT"), is_ready, os.getpid(), os.getppid()))
    os.environ["SET_IN_CHILD"] = "here"
    child = get_mp_context().Process(target=inner, args=(pipe,))
    child.start()
    child.join()
    sys.exit(7)

if __name__ == "__main__":
    os.environ["LEFT_OUT"] = "1"
    fork_server.MODULES = ["vllm.utils.system_utils", "xmlrpc.client"]  # the others take long
    fork_server.start()
    fork_server.start()
    from vllm.utils.system_utils import get_mp_context
    fork_server.use()
    del os.environ["LEFT_OUT"]
    os.environ["SET_LATE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    ours, theirs = get_mp_context().Pipe()
    process = get_mp_context().Process(target=outer, args=(theirs,))
    process.start()
    theirs.close()
    found = [ours.recv(), ours.recv()]
    process.join()
    fork_server.inspect_models()
    from vllm.model_executor.models import registry
    found.append(registry._run_in_subprocess(lambda: os.getppid()))
    try:
        registry._run_in_subprocess(lambda: found[99])
    except IndexError as error:
        print(json.dumps({"messages": found, "exit": process.exitcode, "error": str(error)}))
"""


def test_processes_are_forked_from_one_server_with_their_parents_environment(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (_, late, left_out, is_ready, _, server), (_, inner_late, in_child, _, inner_server), inspected = found["messages"]
    assert (late, left_out, is_ready, found["exit"]) == ("1", None, True, 7)
    assert (inner_late, in_child, inner_server) == ("1", "here", server)
    assert inspected == server, "what vLLM asks of a model's class is found in such a process too"
    assert found["error"] == "list index out of range"
