//! The kernel's programs at interfaces' devices.

use super::desired::InterfaceSpec;
use vnet::interface::pair::PairKind;
use vnet::interface::{Interface, KernelDevice};
use vnet::kernel::{Attached, GuestDevice, Kernel, KernelError};

/// Why an interface of a kind without programs has no kernel path.
pub(super) fn without_kernel(spec: &InterfaceSpec) -> String {
    format!("only kinds veth and local have it, this is kind {}", spec.attachment.kind())
}

/// Has an interface accept the answers to flows that the kernel has forwarded for a vnetd that has died.
pub(super) fn adopt_flows(kernel: &Kernel, interface: &dyn Interface) {
    let device = interface.kernel_device().map(|device| device.host.1);
    let sources = device.map(|device| kernel.flows().adopted_sources(device));
    sources.into_iter().flatten().for_each(|src| interface.forwarded_from(src));
}

/// Attaches programs to an interface's device; the error is the reason why there is no kernel path.
pub(super) fn attach(
    interface: &dyn Interface,
    programs: impl FnOnce(&GuestDevice) -> Result<Attached, KernelError>,
) -> Result<Attached, String> {
    let KernelDevice { host, tap, mac, pair, .. } = interface.kernel_device().ok_or("it has no device")?;
    let netkit = *pair == Some(PairKind::Netkit);
    let device = GuestDevice { host: host.clone(), tap: tap.clone(), mac: *mac, netkit };
    programs(&device).map_err(|error| error.to_string())
}
