"""The lab: hosts as network namespaces, containers as namespaces with a TAP, and virtual machines under QEMU.

In the order in which a lab comes up: `topology` names and addresses everything, `underlay` joins the hosts, `daemon`
starts a vnetd on each, `container` and `guest` attach to it, `lab` does it all and takes it down again. `image` makes
what guests boot, `channel` runs commands in them, `machine` runs commands anywhere, `measure` and `demo` use it all.
"""
