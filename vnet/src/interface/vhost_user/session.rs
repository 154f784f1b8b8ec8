//! One connection with a front end: implements the messages of the vhost-user protocol.
//!
//! Crate `vhost` reads messages and checks their form and the number of file descriptors; this file checks their contents. Any
//! error ends the connection, which resets the device. A session begins with nothing negotiated.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost::vhost_user::message::*;
use vhost::vhost_user::{Backend, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use super::closer;
use super::event::{Event, KickEvent, is_eventfd};
use super::private;
use super::queue_pairs::Device;
use super::vring::{Addresses, Common, Vring};
use super::{config_space, features};
use crate::interface::virtqueue::QUEUE_SIZE_MAX;
use crate::interface::virtqueue::dirty::{DirtyLog, Signal};
use crate::interface::virtqueue::memory::{GuestMemory, REGIONS_MAX, Region, RegionSpec};
use crate::unix::Peer;
use crate::wire::ethernet::Mac;

/// State negotiated with one front end.
pub(super) struct Session {
    device: Arc<Device>,
    /// The front end's process.
    peer: Peer,
    common: Common,
    protocol: u64,
    /// Tells the front end that pages were marked (SET_LOG_FD).
    log_signal: Option<Signal>,
}

/// A protocol error with vnet's message.
pub(super) fn refuse(text: impl Into<String>) -> Error {
    Error::ReqHandlerError(io::Error::other(text.into()))
}

fn unsupported<T>(what: &str) -> Result<T> {
    Err(refuse(format!("{what} is not supported and was not offered")))
}

fn spec_of(region: &VhostUserMemoryRegion) -> RegionSpec {
    RegionSpec {
        guest_addr: region.guest_phys_addr,
        user_addr: region.user_addr,
        len: region.memory_size,
        offset: region.mmap_offset,
    }
}

/// Checks that a file descriptor from the front end is an eventfd.
fn checked_eventfd(file: Option<File>) -> Result<Option<File>> {
    match file {
        Some(file) if !is_eventfd(&file) => {
            closer::close(file);
            Err(refuse("a vring's file descriptor is not an eventfd, or /proc is not mounted to tell"))
        }
        file => Ok(file),
    }
}

/// Maps a region. On error the caller passes the file, which may be of any kind, to the closer.
fn map(spec: RegionSpec, file: &File) -> Result<Arc<Region>> {
    Region::map(spec, file).map_err(|error| refuse(error.to_string()))
}

impl Session {
    pub(super) fn new(device: Arc<Device>, peer: Peer) -> Session {
        Session { device, peer, common: Common::default(), protocol: 0, log_signal: None }
    }

    pub(super) fn common(&self) -> &Common {
        &self.common
    }

    /// Acknowledged protocol features.
    pub(super) fn protocol(&self) -> u64 {
        self.protocol
    }

    /// True if REPLY_ACK was negotiated.
    pub(super) fn acknowledges(&self) -> bool {
        self.protocol & VhostUserProtocolFeatures::REPLY_ACK.bits() != 0
    }

    /// Runs `change` on vring `index`. The index is checked at its full width on the wire.
    fn vring<R>(&self, index: u32, change: impl FnOnce(&mut Vring) -> R) -> Result<R> {
        let found = usize::try_from(index).ok().and_then(|index| self.device.change(index, change));
        found.ok_or_else(|| {
            refuse(format!(
                "the front end uses vring {index}, but interface {} has {} queue pairs; set its `queues` to the front \
                 end's number",
                self.device.options.name, self.device.options.queues
            ))
        })
    }

    /// Wraps an eventfd of the front end that vnetd will signal.
    fn event(&self, file: Option<File>) -> Result<Option<Event>> {
        Ok(checked_eventfd(file)?.map(|file| Event::new(file, self.device.signals.clone())))
    }

    /// Notifies the guest on all queues.
    pub(super) fn notify(&self) {
        self.device.change_all(|vring| _ = vring.notify());
    }

    fn set_regions(&mut self, regions: Vec<Arc<Region>>) -> Result<()> {
        let memory = GuestMemory::new(regions).map_err(|e| refuse(e.to_string()))?;
        self.common.memory = Some(Arc::new(memory));
        self.apply()
    }

    pub(super) fn regions(&self) -> &[Arc<Region>] {
        self.common.memory.as_ref().map_or(&[], |memory| memory.regions())
    }

    /// Checks the number and total length of regions before they are mapped.
    fn check_share(&self, lens: impl Iterator<Item = u64>) -> Result<()> {
        let (mut count, mut bytes) = (0, 0u64);
        lens.for_each(|len| (count, bytes) = (count + 1, bytes.saturating_add(len)));
        if count > REGIONS_MAX {
            return Err(refuse(format!("the front end shares more than {REGIONS_MAX} regions of memory")));
        }
        let (name, most) = (&self.device.options.name, self.device.options.memory_max());
        if bytes > most {
            let (mib, most) = (bytes.div_ceil(1 << 20), most >> 20);
            let text = format!(
                "the front end shares {mib} MiB of memory, but interface {name} takes at most {most} MiB; set its \
                 `memory_limit`"
            );
            return Err(refuse(text));
        }
        Ok(())
    }

    /// Applies the state common to all vrings.
    fn apply(&self) -> Result<()> {
        if let (true, Some(log), Some(memory)) = (self.common.logs(), &self.common.log, &self.common.memory) {
            let (bytes, needed) = (log.bytes(), DirtyLog::bytes_for(memory));
            if bytes < needed {
                return Err(refuse(format!(
                    "the log of dirty pages has {bytes} bytes, but the guest's memory needs {needed}"
                )));
            }
        }
        self.device.set_common(&self.common);
        Ok(())
    }

    /// Wraps the eventfd of SET_LOG_FD, signalled after pages were marked.
    pub(super) fn set_log_fd(&mut self, file: File) -> Result<()> {
        let event = self.event(Some(file))?;
        self.log_signal = event.map(|event| -> Signal {
            Arc::new(move || {
                event.signal();
            })
        });
        self.common.log =
            self.common.log.take().map(|log| Arc::new(log.with_signal(self.log_signal.clone())));
        self.apply()
    }

    /// Records whether the front end maps one of `files` privately: its guest then does not use the memory that vnetd sees.
    fn look_for_private_memory(&self, files: &[File]) {
        let Some(pid) = self.peer.pid else { return };
        if private::maps_privately(pid, files) {
            tracing::warn!("{}", private::NOTE);
            self.device.set_private_memory(Some(private::NOTE.to_owned()));
        }
    }

    /// SEND_RARP: `payload` holds a MAC address in its first six bytes.
    pub(super) fn send_rarp(&mut self, payload: [u8; 8]) -> Result<()> {
        let [a, b, c, d, e, f, _, _] = payload;
        let mac = Mac([a, b, c, d, e, f]);
        if !mac.is_unicast() {
            return Err(refuse(format!("SEND_RARP for {mac}, which is not a unicast address")));
        }
        self.device.announce(mac);
        Ok(())
    }

    /// NET_SET_MTU: returns false if the guest would get a larger MTU than the interface carries. The connection stays open.
    pub(super) fn set_mtu(&mut self, mtu: u64) -> bool {
        let ours = self.device.options.mtu as u64;
        if mtu > ours {
            tracing::warn!(mtu, ours, "the front end's host_mtu is larger than the interface's MTU");
        }
        mtu <= ours
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        // RESET_OWNER is deprecated in favour of RESET_DEVICE.
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.device.change_all(Vring::reset_device);
        self.device.loans.revoke_all();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(features::offered(&self.device.options))
    }

    fn set_features(&mut self, wanted: u64) -> Result<()> {
        let foreign = wanted & !features::offered(&self.device.options);
        if foreign != 0 {
            return Err(refuse(format!(
                "the front end acknowledged features that were not offered: {foreign:#x}"
            )));
        }
        let logged = self.common.logs();
        self.common.features = wanted;
        if logged && !self.common.logs() {
            // The migration has ended, or failed. The next one shares another log.
            self.common.log = None;
        }
        self.apply()?;
        if wanted & features::PROTOCOL_FEATURES == 0 {
            // Without protocol features there is no SET_VRING_ENABLE, so rings start enabled.
            self.device.change_all(|vring| vring.set_enabled(true));
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        if regions.len() != files.len() {
            files.into_iter().for_each(closer::close);
            return Err(refuse("SET_MEM_TABLE needs one file descriptor for each region"));
        }
        let mapped = self.check_share(regions.iter().map(|region| region.memory_size)).and_then(|()| {
            let pairs = regions.iter().zip(&files);
            pairs.map(|(region, file)| map(spec_of(region), file)).collect::<Result<Vec<_>>>()
        });
        match mapped {
            Ok(mapped) => self.set_regions(mapped)?,
            Err(error) => {
                files.into_iter().for_each(closer::close);
                return Err(error);
            }
        }
        self.device.set_private_memory(None);
        self.look_for_private_memory(&files);
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        if !num.is_power_of_two() || num > u32::from(QUEUE_SIZE_MAX) {
            return Err(refuse(format!(
                "vring {index}: size {num} is not a power of two up to {QUEUE_SIZE_MAX}"
            )));
        }
        self.vring(index, |vring| vring.set_size(num))
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let used_log = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        self.vring(index, |vring| vring.set_addresses(Addresses { descriptors, available, used, used_log }))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base)
            .map_err(|_| refuse(format!("vring {index}: base {base} does not fit in 16 bits")))?;
        self.vring(index, |vring| vring.set_base(base))
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        if self.common.logs() {
            // Set before the ring stops: whoever finds the interface down also finds the reason.
            self.device.departed.store(true, Ordering::Release);
        }
        let base = self.vring(index, Vring::stop)?;
        self.device.loans.revoke_all();
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let signals = &self.device.signals;
        let kick = checked_eventfd(file)?.map(|file| KickEvent::new(file, signals.clone()));
        self.vring(index.into(), |vring| vring.set_kick(kick))?;
        self.device.departed.store(false, Ordering::Release);
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let event = self.event(file)?;
        self.vring(index.into(), |vring| vring.set_call(event))
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let event = self.event(file)?;
        self.vring(index.into(), |vring| vring.set_error(event))
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(features::protocol(&self.device.options))
    }

    fn set_protocol_features(&mut self, wanted: u64) -> Result<()> {
        let foreign = wanted & !features::protocol(&self.device.options).bits();
        if foreign != 0 {
            return Err(refuse(format!(
                "the front end acknowledged protocol features that were not offered: {foreign:#x}"
            )));
        }
        self.protocol = wanted;
        self.common.shares_log = wanted & VhostUserProtocolFeatures::LOG_SHMFD.bits() != 0;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.device.vrings() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.vring(index, |vring| vring.set_enabled(enable))
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        config_space::read(&self.device.options, offset, size).ok_or_else(|| {
            refuse(format!("GET_CONFIG of {size} bytes at {offset} lies outside the configuration space"))
        })
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        // A net device's configuration space is read-only for VERSION_1 drivers. Older drivers may write only the MAC address, on
        // which vnet does not filter.
        Ok(())
    }

    fn set_backend_req_fd(&mut self, _backend: Backend) {}

    fn set_gpu_socket(&mut self, _socket: GpuBackend) -> Result<()> {
        unsupported("GPU_SET_SOCKET")
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        unsupported("GET_SHARED_OBJECT")
    }

    fn get_inflight_fd(&mut self, _inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        unsupported("GET_INFLIGHT_FD")
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, file: File) -> Result<()> {
        closer::close(file);
        unsupported("SET_INFLIGHT_FD")
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        let lens = self.regions().iter().map(|region| region.spec().len).chain([region.memory_size]);
        let mapped = match self.check_share(lens).and_then(|()| map(spec_of(region), &file)) {
            Ok(mapped) => mapped,
            Err(error) => {
                closer::close(file);
                return Err(error);
            }
        };
        let mut regions = self.regions().to_vec();
        regions.push(mapped);
        self.set_regions(regions)?;
        self.look_for_private_memory(&[file]);
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        // Ignores the offset, because front ends send different values here.
        let spec = spec_of(region);
        let same = |r: &RegionSpec| {
            (r.guest_addr, r.user_addr, r.len) == (spec.guest_addr, spec.user_addr, spec.len)
        };
        let (gone, stay): (Vec<_>, Vec<_>) = self.regions().iter().cloned().partition(|r| same(r.spec()));
        if gone.is_empty() {
            return Err(refuse(format!(
                "REM_MEM_REG of a region at {:#x} that was never added",
                spec.guest_addr
            )));
        }
        self.set_regions(stay)
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        file: File,
    ) -> Result<Option<File>> {
        closer::close(file);
        unsupported("SET_DEVICE_STATE_FD")
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported("CHECK_DEVICE_STATE")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported("GET_SHMEM_CONFIG")
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        // The kernel charges pages of the log that vnetd touches first to vnetd, like those of guest memory.
        let mapped = self.check_share([log.mmap_size].into_iter()).and_then(|()| {
            let mapped = DirtyLog::map(&file, log.mmap_offset, log.mmap_size);
            mapped.map_err(|error| refuse(format!("the log of dirty pages: {error}")))
        });
        match mapped {
            Ok(log) => self.common.log = Some(Arc::new(log.with_signal(self.log_signal.clone()))),
            Err(error) => {
                closer::close(file);
                return Err(error);
            }
        }
        self.apply()
    }
}
