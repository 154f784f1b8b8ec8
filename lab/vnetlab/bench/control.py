"""Many agents of the distributed overlay against one real etcd: vnetd/examples/agents.rs, which tells what it measures.

Every agent has the whole view of a host of its own, so one machine holds as many as its memory and processors allow;
the other hosts are there as records only, which costs an agent exactly the same.
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
    """How much there is of everything."""

    hosts: int
    stations: int
    agents: int
    moves: int
    """Stations that move while the agents are measured, one a second."""


FULL = Scale(hosts=1_000, stations=100_000, agents=20, moves=20)
QUICK = Scale(hosts=20, stations=1_000, agents=4, moves=3)


def measure(vnet: Vnet, topology: Topology, scale: Scale) -> Sample:
    """One run on an etcd of its own, which is empty before."""
    with vnet.own_binaries():
        program = vhost.example("agents")
    store.start(topology)
    try:
        numbers = (scale.hosts, scale.stations, scale.agents, scale.moves)
        words = [str(program), store.endpoint(topology), *map(str, numbers)]
        return json.loads(run(store.inside(topology, *words), timeout_s=TIMEOUT_S))
    finally:
        store.stop(topology, forget=True)
