"""The lab: hosts as network namespaces, containers as namespaces with a TAP, and virtual machines under QEMU.

In the order of start-up: `topology` names and addresses everything, `underlay` connects the hosts, `daemon` starts a
vnetd on each, `container` and `guest` attach to it; `lab` brings all of it up and down. `image` builds what guests
boot, `channel` runs commands in guests, `machine` on any node; `measure` and `demo` use all of them.
"""
