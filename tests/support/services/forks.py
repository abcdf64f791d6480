"""Processes of Eyas that start in a fraction of a second: a fork server imports what services import, each start is a fork.

`Popen` stands in for `subprocess.Popen`. What it starts is a child of this process, with the command's arguments, output,
environment, folder, session, signals and exit status. Variables that are read while a module is imported come too late.
The fork server imports, and does no more: no operation of torch, no channel and no server of gRPC.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, AnyStr, ClassVar

import pytest

from eyas.services.local import cluster
from tests.support.repository import ROOT

MAX_BYTES = 1 << 20
NUM_STREAMS = 3
PR_SET_CHILD_SUBREAPER = 36
SERVICES = ("eyas.services.router", "eyas.services.verifier", "eyas.services.draft")
STARTERS = ("eyas.services.local", "eyas.cli")  # they may start services themselves
MODULES = (*SERVICES, *STARTERS, "tests.chaos.services")
PRELOAD = (
    *(f"{name}.__main__" for name in SERVICES),
    *STARTERS,
    "eyas.services.local.serve",
    "transformers.generation",
    "transformers.models.llama.modeling_llama",
    *(["eyas.kernels.cpu.layers"] if find_spec("numba") else ()),
    *(["datasets"] if find_spec("datasets") else ()),
)


class Popen(subprocess.Popen[AnyStr]):
    """`subprocess.Popen` whose programs of Eyas, `python -m MODULE`, are forks; any other command starts as usual.

    preexec_fn: None, or a partial call of prctl. server: started when it is first needed.
    """

    server: ClassVar[Server | None] = None
    lock: ClassVar[threading.Lock] = threading.Lock()

    def _execute_child(self, *values: Any) -> None:
        usual: Any = super()._execute_child  # type: ignore[misc]  # where the standard library starts the process
        asked = inspect.signature(usual).bind(*values).arguments
        python, *words = map(str, asked["args"])
        is_safe = words[:1] == ["-P"]
        option, module, *arguments = words[is_safe:] if len(words) > 2 else ("", "")
        if python != sys.executable or option != "-m" or module not in MODULES:
            usual(*values)
            return
        folder = str(asked["cwd"] or os.getcwd())
        request = {
            "module": module,
            "arguments": arguments,
            "folder": folder,
            "path": [] if is_safe else [folder],
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "has_session": asked["start_new_session"],
            "prctl": asked["preexec_fn"].args if asked["preexec_fn"] else (),
        }
        streams = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        with Popen.lock:
            Popen.server = Popen.server or started_server()
        self.pid = Popen.server.start(request, [own if own != -1 else number for number, own in enumerate(streams)])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[end] for end in ends))  # type: ignore[attr-defined]


@contextmanager
def forked_services() -> Iterator[None]:
    """While the context is open, services that clusters of this process start are forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "Popen", Popen)
        yield


class Server:
    """The fork server at the other end of a connection; it ends when this end is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._lock = threading.Lock()
        self._connection = connection

    def start(self, request: Mapping[str, Any], streams: list[int]) -> int:
        """Start a process with these standard streams. Returns its id.

        The server's own child ends at once and leaves the process to the next ancestor that takes orphans: to this one.
        """
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], streams)
                return int(self._connection.recv(MAX_BYTES))
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)

    def close(self) -> None:
        self._connection.close()


def connected() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def started_server() -> Server:
    """The fork server of this process, which ends with it."""
    ours, its = connected()
    with its:
        command = [sys.executable, "-m", __name__, str(its.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    server = Server(ours)
    atexit.register(process.wait)
    atexit.register(server.close)  # the first of the two
    return server


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request until the client is gone. Returns only in what has been forked, with the request."""
    while True:
        message, streams, _, _ = socket.recv_fds(connection, MAX_BYTES, NUM_STREAMS)
        if not message:
            os._exit(0)
        (pid_out, pid_in), (gate_out, gate_in) = os.pipe(), os.pipe()
        if not (between := os.fork()):
            if pid := os.fork():
                os.write(pid_in, str(pid).encode())
                os._exit(0)
            os.close(gate_in)
            os.read(gate_out, 1)  # until the parent is the client
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.closerange(NUM_STREAMS, max(connection.fileno(), gate_in, gate_out, pid_out, pid_in, *streams) + 1)
            connection.detach()
            request: dict[str, Any] = json.loads(message)
            return request
        os.waitpid(between, 0)
        connection.send(os.read(pid_out, 20))
        for number in (pid_out, pid_in, gate_out, gate_in, *streams):
            os.close(number)


def become(request: Mapping[str, Any]) -> None:
    """Run a request's module as `python -m` would, to its end."""
    if request["has_session"]:
        os.setsid()
    if request["prctl"]:
        ctypes.CDLL(None).prctl(*request["prctl"])
    if request["module"] in STARTERS:
        ours, its = connected()
        if not os.fork():
            ours.close()
            become(serve(its))
        its.close()
        Popen.server, vars(cluster)["Popen"] = Server(ours), Popen
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # an import has asked for it: TMPDIR may be another now
    sys.path[:1] = request["path"]
    sys.argv = [request["module"], *request["arguments"]]
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        if isinstance(ending.code, str):
            raise
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ending.code or 0)  # to clear every module one by one takes longer than the start


def main(number: int) -> None:
    """Import what services import, then serve the client at the other end of the socket with this number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the client
    for name in PRELOAD:
        importlib.import_module(name)
    for name in set(PRELOAD).intersection((*MODULES, *(f"{module}.__main__" for module in MODULES))):
        del sys.modules[name]  # runpy warns of a module that it finds here
    gc.freeze()
    become(serve(socket.socket(fileno=number)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
