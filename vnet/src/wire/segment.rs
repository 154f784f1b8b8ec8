//! Software offload: completes checksums and segments super-frames (TSO, USO) for receivers that do not support them.
//!
//! This is the slow path. It runs only for a receiver that did not negotiate the offload (an old guest, a VNET/P peer). It works
//! on a private copy of the frame, so it never races with a guest.
//!
//! [`finish`] segments in place: it saves the headers once, and before it emits segment *i* it writes them right in front of that
//! segment's payload, over the end of segment *i - 1*, which has been emitted already. No second buffer is needed. [`Cut`] writes
//! headers only, for callers that copy the payload themselves.

use super::checksum::Sum;
use super::ip::{self, IPV6_LEN, TCP, UDP, Version};
use super::offload::{Accepts, F_NEEDS_CSUM, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Offload};

const TCP_HEADER_MIN: usize = 20;
const UDP_HEADER_LEN: usize = 8;
const TCP_FLAG_FIN_PSH: u8 = 0x01 | 0x08;
const TCP_FLAG_CWR: u8 = 0x80;
/// Maximum number of header bytes in front of a payload: Ethernet and two tags, IPv4 or IPv6 with extension headers, TCP.
const HEADERS_MAX: usize = 256;
/// Maximum number of segments of one super-frame: 65 535 bytes at the smallest MSS that Linux sends (`TCP_MIN_SND_MSS`, 48
/// bytes). It keeps a hostile `gso_size` of 1 from turning one frame into 65 000.
pub(crate) const CUTS_MAX: usize = 65_535usize.div_ceil(48);

/// Maximum value of an IP header's length field.
const IP_LEN_MAX: usize = 65_535;

/// Reason why a frame cannot be finished in software.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The headers contradict the metadata, run past the end of the frame, or cannot express a segment's length.
    #[error("headers do not match the offload metadata")]
    Headers,
    /// The headers are longer than any that a NIC has to segment.
    #[error("headers longer than {HEADERS_MAX} bytes")]
    HeadersTooLong,
    /// More segments than any real sender makes: `gso_size` is too small.
    #[error("more than {CUTS_MAX} segments")]
    TooMany,
}

/// Passes `frame` to `emit` in a form that `accepts` allows: unchanged, with its checksum completed, or as finished segments.
/// Calls `emit` at least once when the result is `Ok`, and never when it is `Err`.
///
/// `offload` must have passed [`Offload::checked`] for this length. Overwrites `frame`.
pub fn finish(
    frame: &mut [u8],
    offload: &Offload,
    accepts: &Accepts,
    emit: &mut dyn FnMut(&[u8], Offload),
) -> Result<(), SegmentError> {
    if offload.fits(accepts) {
        emit(frame, *offload);
        return Ok(());
    }
    if offload.gso_kind() != GSO_NONE {
        return Headers::read(frame, frame.len(), offload)?.cut(frame, usize::from(offload.gso_size), emit);
    }
    complete_checksum(frame, offload)?;
    emit(frame, Offload { flags: offload.flags & !F_NEEDS_CSUM, csum_start: 0, csum_offset: 0, ..*offload });
    Ok(())
}

/// Completes a partial checksum: sums from `csum_start` to the end, including the pseudo-header sum in the checksum field, and
/// stores the complement.
pub(crate) fn complete_checksum(frame: &mut [u8], offload: &Offload) -> Result<(), SegmentError> {
    let start = usize::from(offload.csum_start);
    let summed = frame.get_mut(start..).ok_or(SegmentError::Headers)?;
    let sum = Sum::default().with(summed).finish();
    // A UDP checksum of 0 means "none" (RFC 768), so 0 is sent as all ones. TCP accepts both.
    let sum = if sum == 0 { 0xffff } else { sum };
    let at = usize::from(offload.csum_offset);
    let field = summed.get_mut(at..at + 2).ok_or(SegmentError::Headers)?;
    field.copy_from_slice(&sum.to_be_bytes());
    Ok(())
}

/// Segments a super-frame while the caller copies it: the caller puts each segment's payload in place, and [`Cut`] writes the
/// headers in front of it. The payload is read once to copy it and once to sum it.
pub struct Cut {
    headers: Headers,
    offload: Offload,
    payload: usize,
    size: usize,
    count: usize,
}

impl Cut {
    /// Plans the segments of a frame of `len` bytes that begins with `head`. TCP segments shrink below `gso_size` to fit into
    /// `room` bytes, because a stream has no message boundaries. UDP datagrams keep their size.
    ///
    /// It also segments a plain TCP frame with a partial checksum.
    pub fn new(head: &[u8], len: usize, offload: &Offload, room: usize) -> Result<Cut, SegmentError> {
        let mut offload = *offload;
        if offload.gso_kind() == GSO_NONE {
            let (_, ip) = ip::in_frame(head).ok_or(SegmentError::Headers)?;
            offload.gso_type = if ip.is_v4() { GSO_TCPV4 } else { GSO_TCPV6 };
            offload.gso_size = u16::MAX;
        }
        let headers = Headers::read(head, len, &offload)?;
        let mut size = usize::from(offload.gso_size);
        if headers.tcp {
            size = size
                .min(room.checked_sub(headers.len).filter(|room| *room > 0).ok_or(SegmentError::Headers)?);
        }
        let payload = len - headers.len;
        let count = headers.check(payload, size)?;
        Ok(Cut { headers, offload, payload, size, count })
    }

    /// Number of segments, at least 1.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Offload metadata for a downstream segmenter that must produce the same segments.
    pub fn offload(&self) -> Offload {
        // Both casts fit: headers have at most HEADERS_MAX bytes, and `size` started as a u16.
        Offload { hdr_len: self.headers.len as u16, gso_size: self.size as u16, ..self.offload }
    }

    /// Bytes of the headers at the start of each segment.
    pub fn headers_len(&self) -> usize {
        self.headers.len
    }

    /// Bytes of segment `index`, headers included.
    pub fn segment_len(&self, index: usize) -> usize {
        self.headers.len + self.size.min(self.payload - index * self.size)
    }

    /// Writes the headers of segment `index`, checksums included, to the start of `segment`, which already holds the payload
    /// behind them.
    ///
    /// # Panics
    /// When `segment` does not have [`Cut::segment_len`] bytes.
    pub fn write_headers(&self, index: usize, segment: &mut [u8]) {
        assert_eq!(segment.len(), self.segment_len(index));
        segment[..self.headers.len].copy_from_slice(&self.headers.bytes[..self.headers.len]);
        self.headers.amend(segment, index, index * self.size, index + 1 == self.count);
    }
}

/// A super-frame's headers and their offsets.
struct Headers {
    bytes: [u8; HEADERS_MAX],
    /// Bytes of all headers.
    len: usize,
    /// Offset of the IP header.
    ip: usize,
    /// Offset of the TCP or UDP header.
    transport: usize,
    ipv4: bool,
    tcp: bool,
    ecn: bool,
}

impl Headers {
    /// Parses and checks the headers of a frame of `frame_len` bytes that begins with `frame`.
    fn read(frame: &[u8], frame_len: usize, offload: &Offload) -> Result<Headers, SegmentError> {
        let (ip, header) = ip::in_frame(frame).ok_or(SegmentError::Headers)?;
        let transport = usize::from(offload.csum_start);
        let ip_len = frame.get(ip..transport).ok_or(SegmentError::Headers)?.len();
        let ipv4 = header.is_v4();
        let tcp = offload.gso_kind() != GSO_UDP_L4;
        let protocol = if tcp { TCP } else { UDP };
        let fits = match (offload.gso_kind(), header.version) {
            (GSO_TCPV4 | GSO_UDP_L4, Version::V4) => header.len == ip_len && header.protocol == protocol,
            // Behind extension headers only csum_start locates the transport header.
            (GSO_TCPV6 | GSO_UDP_L4, Version::V6) => {
                header.len < ip_len || (header.len == ip_len && header.protocol == protocol)
            }
            _ => false,
        };
        if !fits {
            return Err(SegmentError::Headers);
        }
        let transport_len = if tcp {
            let offset = *frame.get(transport + 12).ok_or(SegmentError::Headers)?;
            usize::from(offset >> 4) * 4
        } else {
            UDP_HEADER_LEN
        };
        let checksum_at = if tcp { 16 } else { 6 };
        let len = transport + transport_len;
        if (tcp && transport_len < TCP_HEADER_MIN)
            || usize::from(offload.csum_offset) != checksum_at
            || len >= frame_len
        {
            return Err(SegmentError::Headers);
        }
        if len > HEADERS_MAX {
            return Err(SegmentError::HeadersTooLong);
        }
        let mut bytes = [0; HEADERS_MAX];
        bytes[..len].copy_from_slice(frame.get(..len).ok_or(SegmentError::Headers)?);
        let ecn = offload.gso_type & GSO_ECN != 0;
        Ok(Headers { bytes, len, ip, transport, ipv4, tcp, ecn })
    }

    fn cut(
        &self,
        frame: &mut [u8],
        gso_size: usize,
        emit: &mut dyn FnMut(&[u8], Offload),
    ) -> Result<(), SegmentError> {
        let count = self.check(frame.len() - self.len, gso_size)?;
        for index in 0..count {
            let start = index * gso_size;
            let end = (self.len + start + gso_size).min(frame.len());
            let segment = &mut frame[start..end];
            segment[..self.len].copy_from_slice(&self.bytes[..self.len]);
            self.amend(segment, index, start, index + 1 == count);
            emit(segment, Offload::default());
        }
        Ok(())
    }

    /// Number of segments for `payload` bytes. An error when there are too many, or when the IP length field cannot express their
    /// length.
    fn check(&self, payload: usize, gso_size: usize) -> Result<usize, SegmentError> {
        let count = payload.div_ceil(gso_size);
        if count > CUTS_MAX {
            return Err(SegmentError::TooMany);
        }
        // An untagged frame may exceed the range of the IP length field by 4 bytes; only a segment that is the whole frame can do
        // so.
        let largest = self.len + payload.min(gso_size) - self.counted_from();
        if largest > IP_LEN_MAX { Err(SegmentError::Headers) } else { Ok(count) }
    }

    /// Offset from which the IP length field counts: IPv4 counts its header, IPv6 does not.
    fn counted_from(&self) -> usize {
        if self.ipv4 { self.ip } else { self.ip + IPV6_LEN }
    }

    /// Adapts the copied headers to segment `index`, whose payload starts `start` bytes into the super-frame's payload.
    fn amend(&self, segment: &mut [u8], index: usize, start: usize, last: bool) {
        let (ip, transport) = (self.ip, self.transport);
        // `check` has made sure that both fit into 16 bits.
        let transport_len = (segment.len() - transport) as u16;
        let ip_len = (segment.len() - self.counted_from()) as u16;
        if self.ipv4 {
            put(segment, ip + 2, ip_len);
            let id = u16::from_be_bytes([segment[ip + 4], segment[ip + 5]]);
            put(segment, ip + 4, id.wrapping_add(index as u16));
            put(segment, ip + 10, 0);
            let sum = Sum::default().with(&segment[ip..transport]).finish();
            put(segment, ip + 10, sum);
        } else {
            put(segment, ip + 4, ip_len);
        }
        let checksum_at = if self.tcp {
            let at = transport + 4;
            let sequence =
                u32::from_be_bytes([segment[at], segment[at + 1], segment[at + 2], segment[at + 3]]);
            segment[at..at + 4].copy_from_slice(&sequence.wrapping_add(start as u32).to_be_bytes());
            let flags = &mut segment[transport + 13];
            if !last {
                *flags &= !TCP_FLAG_FIN_PSH;
            }
            if index > 0 && self.ecn {
                *flags &= !TCP_FLAG_CWR;
            }
            transport + 16
        } else {
            put(segment, transport + 4, transport_len);
            transport + 6
        };
        put(segment, checksum_at, 0);
        let addresses = if self.ipv4 { ip + 12..ip + 20 } else { ip + 8..ip + 40 };
        let protocol = if self.tcp { TCP } else { UDP };
        let sum = Sum::default()
            .with(&segment[addresses])
            .with_u16(u16::from(protocol))
            .with_u16(transport_len)
            .with(&segment[transport..])
            .finish();
        put(segment, checksum_at, if sum == 0 { 0xffff } else { sum });
    }
}

fn put(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

#[cfg(any(test, kani))]
#[path = "segment_proofs.rs"]
mod proofs;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A super-frame with its partial checksum, as Linux passes it to a NIC.
    fn super_frame(ipv4: bool, tcp: bool, vlan: bool, payload: &[u8]) -> (Vec<u8>, Offload) {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        if vlan {
            frame.extend([0x81, 0x00, 0x00, 0x07]);
        }
        let transport_len = if tcp { 32 } else { 8 } + payload.len();
        let protocol = if tcp { 6u8 } else { 17 };
        let addresses = if ipv4 {
            frame.extend([0x08, 0x00, 0x45, 0]);
            frame.extend(((20 + transport_len) as u16).to_be_bytes());
            frame.extend([0xff, 0xff, 0x40, 0, 64, protocol, 0, 0, 10, 77, 1, 1, 10, 77, 2, 1]);
            frame[frame.len() - 8..].to_vec()
        } else {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend((transport_len as u16).to_be_bytes());
            frame.extend([protocol, 64]);
            frame.extend((0..32).map(|i| i as u8));
            frame[frame.len() - 32..].to_vec()
        };
        let start = frame.len();
        let pseudo = Sum::default()
            .with(&addresses)
            .with_u16(protocol.into())
            .with_u16(transport_len as u16)
            .partial()
            .to_be_bytes();
        if tcp {
            frame.extend([0x13, 0x88, 0x17, 0x70, 0xff, 0xff, 0xff, 0x00, 0, 0, 0, 1, 0x80, 0x99, 0x10, 0]);
            frame.extend(pseudo);
            frame.extend([0, 0, 1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8]);
        } else {
            frame.extend([0x13, 0x88, 0x17, 0x70]);
            frame.extend((transport_len as u16).to_be_bytes());
            frame.extend(pseudo);
        }
        let hdr_len = frame.len() as u16;
        frame.extend(payload);
        let gso_type = match (tcp, ipv4) {
            (true, true) => GSO_TCPV4 | GSO_ECN,
            (true, false) => GSO_TCPV6 | GSO_ECN,
            _ => GSO_UDP_L4,
        };
        let offload = Offload {
            flags: F_NEEDS_CSUM,
            gso_type,
            hdr_len,
            gso_size: 1000,
            csum_start: start as u16,
            csum_offset: if tcp { 16 } else { 6 },
        };
        (frame, offload)
    }

    /// Asserts that the lengths and checksums of a finished frame are correct, and returns its payload.
    fn verify(frame: &[u8], ipv4: bool, tcp: bool) -> Vec<u8> {
        let (ip, _) = ip::in_frame(frame).unwrap();
        let (transport, addresses) = if ipv4 {
            assert_eq!(usize::from(u16::from_be_bytes([frame[ip + 2], frame[ip + 3]])), frame.len() - ip);
            assert_eq!(Sum::default().with(&frame[ip..ip + 20]).finish(), 0, "IPv4 header checksum");
            (ip + 20, &frame[ip + 12..ip + 20])
        } else {
            assert_eq!(
                usize::from(u16::from_be_bytes([frame[ip + 4], frame[ip + 5]])),
                frame.len() - ip - 40
            );
            (ip + 40, &frame[ip + 8..ip + 40])
        };
        let sum = Sum::default()
            .with(addresses)
            .with_u16(if tcp { 6 } else { 17 })
            .with_u16((frame.len() - transport) as u16)
            .with(&frame[transport..]);
        assert_eq!(sum.finish(), 0, "transport checksum");
        frame[transport + if tcp { 32 } else { 8 }..].to_vec()
    }

    proptest! {
        #[test]
        fn segments_are_complete_and_correct(
            ipv4: bool, tcp: bool, vlan: bool, payload in prop::collection::vec(any::<u8>(), 1..5000), size in 4u16..2000,
        ) {
            let (mut frame, mut offload) = super_frame(ipv4, tcp, vlan, &payload);
            offload.gso_size = size;
            let offload = offload.checked(frame.len()).unwrap();
            let header = frame.len() - payload.len();
            let original = frame.clone();
            let (mut joined, mut count) = (vec![], 0u32);
            finish(&mut frame, &offload, &Accepts::NOTHING, &mut |segment, rest| {
                assert!(rest.is_none());
                assert!(segment.len() <= header + usize::from(size));
                assert_eq!(segment[..12], original[..12]);
                if tcp {
                    let at = header - 32 + 4;
                    let sequence = u32::from_be_bytes(segment[at..at + 4].try_into().unwrap());
                    assert_eq!(sequence, 0xffff_ff00u32.wrapping_add(joined.len() as u32));
                    let flags = segment[at + 9];
                    assert_eq!(flags & TCP_FLAG_CWR != 0, count == 0);
                    assert_eq!(flags & 0x09 != 0, joined.len() + segment.len() - header == payload.len());
                }
                joined.extend(verify(segment, ipv4, tcp));
                count += 1;
            }).unwrap();
            prop_assert_eq!(joined, payload);
        }

        /// `Cut` produces the same segments as `finish`.
        #[test]
        fn segmenting_while_copying_equals_segmenting_in_place(
            ipv4: bool, tcp: bool, vlan: bool, payload in prop::collection::vec(any::<u8>(), 1..5000), size in 40u16..2000,
            room in 300usize..2100,
        ) {
            let (frame, mut offload) = super_frame(ipv4, tcp, vlan, &payload);
            let header = frame.len() - payload.len();
            offload.gso_size = size;
            let cut = Cut::new(&frame[..header.max(128).min(frame.len())], frame.len(), &offload, room).unwrap();
            if tcp {
                offload.gso_size = size.min((room - header) as u16);
            }
            let mut index = 0;
            finish(&mut frame.clone(), &offload, &Accepts::NOTHING, &mut |segment, _| {
                let mut out = vec![0; cut.segment_len(index)];
                let start = header + index * usize::from(offload.gso_size);
                let part = out.len() - header;
                out[header..].copy_from_slice(&frame[start..start + part]);
                cut.write_headers(index, &mut out);
                assert_eq!(out, segment);
                index += 1;
            }).unwrap();
            prop_assert_eq!(index, cut.count());
        }

        #[test]
        fn checksum_alone(ipv4: bool, tcp: bool, payload in prop::collection::vec(any::<u8>(), 0..1400)) {
            let (mut frame, offload) = super_frame(ipv4, tcp, false, &payload);
            let offload = Offload { gso_type: GSO_NONE, gso_size: 0, hdr_len: 0, ..offload };
            // The sender, not the NIC, computes the IPv4 header checksum.
            if ipv4 {
                let sum = Sum::default().with(&frame[14..34]).finish();
                put(&mut frame, 24, sum);
            }
            finish(&mut frame, &offload, &Accepts::NOTHING, &mut |frame, rest| {
                assert!(rest.is_none());
                assert_eq!(verify(frame, ipv4, tcp), payload);
            }).unwrap();
        }

        #[test]
        fn foreign_bytes_never_panic(mut frame in prop::collection::vec(any::<u8>(), 14..400), header: [u8; 12]) {
            if let Ok(offload) = Offload::from_virtio(&header).checked(frame.len()) {
                let _ = finish(&mut frame, &offload, &Accepts::NOTHING, &mut |_, _| ());
            }
        }
    }

    #[test]
    fn lying_headers_are_refused() {
        let (frame, offload) = super_frame(true, true, false, &[1; 3000]);
        let refused = |change: fn(&mut Vec<u8>, &mut Offload)| {
            let (mut frame, mut offload) = (frame.clone(), offload);
            change(&mut frame, &mut offload);
            finish(&mut frame, &offload, &Accepts::NOTHING, &mut |_, _| panic!("emitted")).unwrap_err()
        };
        assert_eq!(refused(|f, _| f[14] = 0x4f), SegmentError::Headers);
        assert_eq!(refused(|f, _| f[23] = 17), SegmentError::Headers);
        assert_eq!(refused(|f, _| f[46] = 0x10), SegmentError::Headers);
        assert_eq!(refused(|_, o| o.gso_type = GSO_TCPV6), SegmentError::Headers);
        assert_eq!(refused(|_, o| o.csum_start = 30), SegmentError::Headers);
        assert_eq!(refused(|f, _| f.truncate(60)), SegmentError::Headers);
        assert_eq!(refused(|_, o| o.gso_size = 2), SegmentError::TooMany);
    }

    #[test]
    fn lengths_beyond_the_ip_length_field_are_refused() {
        for (ipv4, tcp) in [(true, true), (true, false), (false, true), (false, false)] {
            let headers = super_frame(ipv4, tcp, false, &[]).0.len();
            let longest = 14 + IP_LEN_MAX + if ipv4 { 0 } else { IPV6_LEN } - headers;
            for (payload, fits) in [(longest, true), (longest + 1, false)] {
                let (mut frame, mut offload) = super_frame(ipv4, tcp, false, &vec![7; payload]);
                offload.gso_size = u16::MAX;
                let mut sizes = vec![];
                let result = finish(&mut frame, &offload, &Accepts::NOTHING, &mut |segment, _| {
                    verify(segment, ipv4, tcp);
                    sizes.push(segment.len());
                });
                assert_eq!(result, if fits { Ok(()) } else { Err(SegmentError::Headers) });
                assert_eq!(sizes.len(), usize::from(fits));
            }
        }
    }
}
