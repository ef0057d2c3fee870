"""Connections that processes which are forked do not keep."""

from __future__ import annotations

import multiprocessing
import socket

from shardc.runtime.mesh import inherited


def test_a_process_that_is_forked_does_not_keep_connections_open() -> None:
    with inherited.not_inherited():
        ours, peer = socket.socketpair()
    done, wait = multiprocessing.Pipe()
    forked = multiprocessing.get_context("fork").Process(target=wait.recv)
    forked.start()
    ours.close()
    peer.settimeout(5)
    assert peer.recv(1) == b"", "the other side sees the end"
    peer.close()
    done.send("end")
    forked.join()
