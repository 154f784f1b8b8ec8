"""Why figures differ from the papers': one clause by the contender whose figure is compared."""

from vnetlab.bench.latency import BOTH, CUT_THROUGH
from vnetlab.evaluate.files import OVERLAY
from vnetlab.evaluate.guests import EARLY_ALWAYS
from vnetlab.evaluate.kinds import BRIDGED, DIRECT, MACVLAN, NATIVE, TAP, VETH

_HEADROOM = "docs/lab-notes/2026-11-24-headroom.md"
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
    VETH.name: "vnet adds 0.4 to 0.9 % to the machine's work; figures of one case scatter by 4 to 20 % even without an "
    f"overlay, and in neighbouring turns these cases are equal, but for CG ({_NATIVE})",
}
"""Why rates of applications are worse than the papers', by vnet's path."""
_ONE_BY_ONE = "tun devices take a stream's super-frames whole, but a tunnel's packets one by one"
IPOIB = {
    TAP.name: f"{_ONE_BY_ONE}, and every frame wakes vnetd, which shares two processors with the ranks",
    VETH.name: f"{_ONE_BY_ONE}; at MTU 65 520 frames pass vnetd",
}
"""Why figures on tun devices are worse than the paper's on InfiniBand, by vnet's path."""
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
}
FASTER_FILES = {
    OVERLAY: f"overlayfs hands an open file to the file system below: {_DISK}",
}
XEN = "the paper's TCP passes Xen's bridge and a copy in its driver domain; here TCP is the host's own"
NO_XEN = {NATIVE.name: XEN}
_STAND_IN = "the stand-in differs: macvlan and bridge are kernel devices without a hypervisor"
STAND_IN = {MACVLAN.name: _STAND_IN, BRIDGED.name: _STAND_IN}
OPENVZ = {BRIDGED.name: "the stand-in also encapsulates each frame, and both hosts share two processors"}
TODAY = {BRIDGED.name: "in a kernel of today 64 KB of a stream pass bridge and VXLAN device in one piece"}
_SCATTER = "scatter of the rounds, as no path can be faster than none"
SCATTER = dict.fromkeys((BRIDGED.name, TAP.name, VETH.name), _SCATTER)
PROTOCOL = {NATIVE.name: "the engine also acknowledges each packet, and puts its bytes where they belong"}
GATHERED = {NATIVE.name: "TCP gathers small writes to large segments, while each RDMA write is a packet of its own"}
SOCKETS = {NATIVE.name: "the bound is that of bare sockets of one thread, not of the adapter as in the paper"}
_STREAM = "here a stream leaves the host beside it, and takes processor time; the paper's hosts sent nothing"
KITTEN = {DIRECT.name: "vnetd reads and writes frames in batches here, and no guest is in the way"}
STREAM = dict.fromkeys((BRIDGED.name, TAP.name, VETH.name), _STREAM)
EARLY_WHY = {EARLY_ALWAYS: "an emulated guest takes longer to react, and here lone pings are counted, too"}
_GUESTS_TIME = "an emulated guest's own time is the larger part of a round trip, and of what a stream costs"
PLUS_WHY = dict.fromkeys((BOTH.name, CUT_THROUGH.name), _GUESTS_TIME)
TRACED = (
    "by the trace of experiment `interrupts` early can gain what lies between its announcement and the notification "
    "without it, 13 to 20 us of an emulated guest's 0.6 to 1.2 ms, which scatter by more "
    "(docs/lab-notes/2026-11-22-optimistic-interrupts.md)"
)
