"""Leases to messages of the Worker service and back. The only code that touches their fields."""

from __future__ import annotations

from typing import cast, get_args

from eyas.errors import InvalidRequest
from eyas.rpc.messages import Lease, Load, Role
from eyas.rpc.wire import model_info_from_message, model_info_to_message
from eyas.v1 import worker_pb2


def status_to_message(lease: Lease, *others: Lease) -> worker_pb2.WorkerStatus:
    """All of a lease but its address, which whoever asks knows. others: of the same process."""
    return worker_pb2.WorkerStatus(
        role=lease.role,
        incarnation=lease.incarnation,
        model=model_info_to_message(lease.model),
        load=worker_pb2.Load(
            num_running=lease.load.num_running,
            num_waiting=lease.load.num_waiting,
            free_slots=lease.load.free_slots,
            max_running=lease.load.max_running,
            step_seconds=lease.load.step_seconds,
        ),
        zone=lease.zone,
        prefixes=lease.prefixes,
        others=map(status_to_message, others),
    )


def statuses_from_message(message: worker_pb2.WorkerStatus, address: str) -> tuple[Lease, ...]:
    """The leases of all workers of the process that said so. Raises InvalidRequest for a role that there is not."""
    return tuple(status_from_message(part, address) for part in (message, *message.others))


def status_from_message(message: worker_pb2.WorkerStatus, address: str) -> Lease:
    """The lease of the worker that said so at `address`. Raises InvalidRequest for a role that there is not."""
    if message.role not in get_args(Role):
        raise InvalidRequest(f"role is {message.role!r}; known are {', '.join(get_args(Role))}")
    load = message.load
    return Lease(
        role=cast("Role", message.role),
        address=address,
        incarnation=message.incarnation,
        model=model_info_from_message(message.model),
        load=Load(load.num_running, load.num_waiting, load.free_slots, load.max_running, load.step_seconds),
        zone=message.zone,
        prefixes=frozenset(message.prefixes),
    )
