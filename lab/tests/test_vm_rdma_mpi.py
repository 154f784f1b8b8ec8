"""MPI between virtual machines whose messages vnetd's engine carries, past the guests' network stacks."""

from pathlib import Path

from conftest import MakeLab
from rdma_guests import rdma_metric

from vnetlab import channel
from vnetlab.bench import mpi
from vnetlab.daemon import REPOSITORY
from vnetlab.rdma import BOOT_S, start_helpers
from vnetlab.run import run
from vnetlab.topology import Kind

PROGRAM = REPOSITORY / "fabric" / "tests" / "mpi.c"


def test_ranks_in_virtual_machines_exchange_messages_of_all_sizes(make_lab: MakeLab, tmp_path: Path):
    topology = make_lab(hosts=2, vms=1, containers=0, rdma=True, mpi=True)
    start_helpers(topology)
    run(["mpicc", "-O1", "-o", str(tmp_path / "mpi"), str(PROGRAM)])
    guests, printed = topology.machines(Kind.VM), []
    program = mpi.install(guests, str(tmp_path / "mpi"))
    with mpi.launcher(guests, mpi.FABRIC) as mpirun:
        words = [*mpirun, "-x", "VNET_RDMA_ATTACHMENT=vm", program]
        status = channel.execute(guests[0], words, BOOT_S, printed.append)
    assert (status, b"".join(printed)) == (0, b"2 ranks agree\n")
    for guest in guests:
        assert rdma_metric(topology.hosts[guest.host - 1], guest, "out_bytes_total") > 1 << 20
