"""Many agents of the distributed overlay against one real etcd: vnetd/examples/agents.rs, which defines the metrics.

Every agent holds the complete view of its own host, so memory and CPUs limit the number of agents. The other hosts
exist only as records, which cost an agent as much as real hosts.
"""

import json
from dataclasses import dataclass

from vnetlab import store
from vnetlab.bench import vhost
from vnetlab.bench.contenders import Vnet
from vnetlab.bench.result import Sample
from vnetlab.run import run
from vnetlab.topology import Topology

TIMEOUT_S = 900


@dataclass(frozen=True)
class Scale:
    """Size of the overlay."""

    hosts: int
    stations: int
    agents: int
    moves: int
    """Stations that move during the measurement, one per second."""


FULL = Scale(hosts=1_000, stations=100_000, agents=20, moves=20)
QUICK = Scale(hosts=20, stations=1_000, agents=4, moves=3)


def measure(vnet: Vnet, topology: Topology, scale: Scale) -> Sample:
    """Runs the load test once on a fresh etcd."""
    with vnet.own_binaries():
        program = vhost.example("agents")
    store.start(topology)
    try:
        numbers = (scale.hosts, scale.stations, scale.agents, scale.moves)
        words = [str(program), store.endpoint(topology), *map(str, numbers)]
        return json.loads(run(store.inside(topology, *words), timeout_s=TIMEOUT_S))
    finally:
        store.stop(topology, forget=True)
