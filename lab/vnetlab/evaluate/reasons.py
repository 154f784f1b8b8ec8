"""Why figures differ from the papers': one clause by the contender whose figure is compared."""

from vnetlab.bench.latency import BOTH
from vnetlab.evaluate.files import OVERLAY, VIRTIO
from vnetlab.evaluate.guests import EARLY_ALWAYS
from vnetlab.evaluate.kinds import BRIDGED, MACVLAN, NATIVE, TAP, VETH

_HEADROOM = "docs/lab-notes/2026-11-24-headroom.md"
_CONTROL = "docs/lab-notes/2026-11-25-congestion-control.md"
_NATIVE = "docs/lab-notes/2026-11-28-ratio-to-native.md"
COPIED = "each byte is copied through user space (docs/performance.md)"
LATENCY = {
    TAP.name: "the two hosts share two processors with vnetd and the ranks, so every wake-up waits for a processor",
    VETH.name: "a frame passes one device and three hash tables more than native, which caches miss after a pause "
    f"({_HEADROOM})",
}
NATIVE_LATENCY = LATENCY | {
    VETH.name: "programs and a second device's queue take 0.6 to 0.9 us of a ping-pong's way, and about 2 us of a "
    f"ring's; a second device alone (macvlan) misses it, too ({_NATIVE})",
}
"""Why latencies are worse than those on the underlay itself, by vnet's path."""
COPIES = {
    TAP.name: COPIED,
    VETH.name: "frames pass one device more than native, and untranslated ones have 50 bytes of headers more",
}
RATES = {
    TAP.name: "every frame wakes vnetd, which shares two processors with the ranks, and is copied through user space",
    VETH.name: "programs and a second device take up to 4 % of the ranks' time "
    f"({_CONTROL}); figures of one case scatter by 4 to 20 % even without an overlay ({_NATIVE})",
}
"""Why rates of applications are worse than the papers', by vnet's path."""
NOISE = {
    VETH.name: "figures of one case scatter even without an overlay, those of NPB by 4 to 20 % "
    f"({_NATIVE}): compare means"
}
"""Why single cases of applications are worse than with kernel VXLAN."""
NO_GUEST = {
    TAP.name: "containers have neither exits nor virtual interrupts, which the paper's guests have",
    VETH.name: "known flows stay in the kernel, and containers have neither exits nor virtual interrupts",
}
"""Why figures are better than the papers', by vnet's path."""
_DISK = "two kinds of storage are files of one disk here, which reads and writes at different speeds from time to time"
EMULATED = {
    OVERLAY: "files are those of one disk, and overlayfs first looks a file up in both of its layers",
    VIRTIO: "the guest is emulated, and its disk is a file of the host",
}
FASTER_FILES = {
    OVERLAY: f"overlayfs hands an open file to the file system below: {_DISK}",
    VIRTIO: f"Xen's blocks pass a driver domain, here there is none, and {_DISK}",
}
XEN = "the paper's TCP passes Xen's bridge and a copy in its driver domain; here TCP is the host's own"
NO_XEN = {NATIVE.name: XEN}
_STAND_IN = "the stand-in differs: macvlan and bridge are kernel devices without a hypervisor"
STAND_IN = {MACVLAN.name: _STAND_IN, BRIDGED.name: _STAND_IN}
OPENVZ = {BRIDGED.name: "the stand-in also encapsulates each frame, and both hosts share two processors"}
TODAY = {BRIDGED.name: "in a kernel of today 64 KB of a stream pass bridge and VXLAN device in one piece"}
SCATTER = {BRIDGED.name: "scatter of the rounds, as a bridge cannot be faster than no bridge"}
PROTOCOL = {NATIVE.name: "the engine also acknowledges each packet, and puts its bytes where they belong"}
GATHERED = {NATIVE.name: "TCP gathers small writes to large segments, while each RDMA write is a packet of its own"}
SOCKETS = {NATIVE.name: "the bound is that of bare sockets of one thread, not of the adapter as in the paper"}
STREAM = {
    BRIDGED.name: "here a stream leaves the host beside it, and takes processor time; the paper's hosts sent nothing"
}
EARLY_WHY = {EARLY_ALWAYS: "an emulated guest takes longer to react, and here lone pings are counted, too"}
PLUS_WHY = {BOTH.name: "an emulated guest's own time is the larger part of a round trip, and of what a stream costs"}
TRACED = "the trace of experiment `interrupts` has the steps: early can gain what lies between announced and notified"
