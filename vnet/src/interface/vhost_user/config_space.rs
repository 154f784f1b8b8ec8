//! The device configuration space that a guest reads (virtio 1.2 section 5.1.4): MAC, status, queues, MTU.

use super::options::VhostUserOptions;

/// `status`: the link is up (virtio 1.2 section 5.1.4).
const STATUS_LINK_UP: u16 = 1;
/// Size in bytes of the `struct virtio_net_config` that is served; fields after `mtu` are zero.
const CONFIG_LEN: usize = 64;

/// Reads `size` bytes from `offset`; `None` if the range lies outside.
pub(super) fn read(options: &VhostUserOptions, offset: u32, size: u32) -> Option<Vec<u8>> {
    let mut space = [0; CONFIG_LEN];
    space[..6].copy_from_slice(&options.mac.unwrap_or_default().0);
    space[6..8].copy_from_slice(&STATUS_LINK_UP.to_le_bytes());
    space[8..10].copy_from_slice(&(options.queues as u16).to_le_bytes());
    space[10..12].copy_from_slice(&(options.mtu as u16).to_le_bytes());
    let start = usize::try_from(offset).ok()?;
    let end = start.checked_add(usize::try_from(size).ok()?)?;
    Some(space.get(start..end)?.to_vec())
}
