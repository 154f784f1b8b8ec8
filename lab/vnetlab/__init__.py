"""The lab: hosts as network namespaces, containers as namespaces with a TAP, and virtual machines under QEMU.

In the order of start-up: `topology` names and addresses all nodes, `underlay` connects the hosts, `daemon` starts a
vnetd on each host, `container` and `guest` attach to it; `lab` brings everything up and down. `image` builds the files
that guests boot, `channel` runs commands in guests, `machine` on any node; `measure` and `demo` use all of them.
"""
