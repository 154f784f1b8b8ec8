//! `POST /v1/capture`: streams frames in the pcapng format (draft-ietf-opsawg-pcapng) while the client reads.
//!
//! Each capture has a task that drains the dispatchers' buffers every [`LOOK`], encodes the frames and writes them to the
//! connection, one chunk at a time. A client that does not read a chunk within [`STALL`] is disconnected; a closed connection is
//! noticed at once. While a client stalls, frames that find the buffers full are missed; interface statistics blocks report their
//! number.
//!
//! Each port is a pcapng interface with the port's name. Packet flags give the direction as seen from vnet: inbound frames come
//! from a guest or another host. Comments carry metadata that Ethernet cannot: the drop reason, super-frames, partial checksums.
//! The section is big-endian because statistics blocks store 64-bit times with the high word first.

#![allow(unused_qualifications, reason = "utoipa writes qualified names")]

use std::borrow::Cow;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use http_body::{Body as HttpBody, Frame as BodyFrame};
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::blocks::interface_statistics::{InterfaceStatisticsBlock, InterfaceStatisticsOption};
use pcap_file::pcapng::blocks::section_header::{SectionHeaderBlock, SectionHeaderOption};
use pcap_file::{DataLink, Endianness, PcapResult};
use serde::Deserialize;
use tokio::sync::mpsc;
use utoipa::IntoParams;
use vnet::capture::{self, Batched, Direction, Filter, Options, Record, SNAP_MIN, Session};
use vnet::frame::FRAME_MAX;
use vnet_control::api;

use crate::shared::{Refused, Shared, with_engine};

/// Drain interval of the dispatchers' buffers; see [`capture::SESSION_BYTES`].
const LOOK: Duration = Duration::from_millis(5);
/// Timeout for one chunk.
const STALL: Duration = Duration::from_secs(30);
/// EPB flags: the direction is in the two lowest bits.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

/// Query parameters of `POST /v1/capture`.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct CaptureQuery {
    /// `any`, `interface NAME`, `link NAME`, or NAME.
    port: String,
    /// Filter expression.
    #[serde(default)]
    filter: String,
    /// Bytes kept of each frame. Default: all.
    snap: Option<u32>,
    /// Stop after this many frames.
    count: Option<u64>,
    /// Only dropped frames.
    #[serde(default)]
    drops: bool,
}

/// Captures frames as a pcapng stream that lasts as long as the client reads it
#[utoipa::path(post, path = "/v1/capture", params(CaptureQuery),
    responses((status = 200, body = Vec<u8>, content_type = "application/x-pcapng"), (status = "4XX", body = api::Refusal)))]
pub async fn capture(
    State(shared): State<Shared>,
    query: Result<Query<CaptureQuery>, QueryRejection>,
) -> Result<Response, Refused> {
    let Query(CaptureQuery { port, filter, snap, count, drops }) = query?;
    let filter: Filter = filter.parse().map_err(|error: capture::FilterError| error.to_string())?;
    let snap = snap.unwrap_or(FRAME_MAX as u32);
    if !(SNAP_MIN..=FRAME_MAX as u32).contains(&snap) {
        return Err(format!("snap length {snap} is beyond the limits; use {SNAP_MIN} to {FRAME_MAX}").into());
    }
    let options = Options { filter, snap, drops_only: drops };
    let session =
        with_engine(shared.clone(), move |engine| Ok(engine.start_capture(&port, options)?)).await?;
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        feed(&session, count.unwrap_or(u64::MAX), &sender).await;
        session.end();
        // This fails only while vnetd stops.
        let _ = with_engine(shared, |engine| {
            engine.forget_ended_captures();
            Ok(())
        })
        .await;
    });
    Ok(([(header::CONTENT_TYPE, "application/x-pcapng")], Body::new(Chunks(receiver))).into_response())
}

/// Sends captured frames until the client has disconnected or received `count` of them.
async fn feed(session: &Arc<Session>, count: u64, sender: &mpsc::Sender<Bytes>) {
    let Ok(mut encoder) = Encoder::new(session.options().snap, count) else { return };
    let mut first = true;
    while encoder.left > 0 || first {
        if !std::mem::take(&mut first) {
            tokio::select! {
                () = sender.closed() => return,
                () = tokio::time::sleep(LOOK) => {}
            }
        }
        let session = session.clone();
        // Encode on a blocking thread: there may be megabytes.
        let looked = tokio::task::spawn_blocking(move || {
            let piece = encoder.look(&session);
            (encoder, piece)
        });
        let Ok((back, Ok(piece))) = looked.await else { return };
        encoder = back;
        if !piece.is_empty() && !matches!(tokio::time::timeout(STALL, sender.send(piece)).await, Ok(Ok(()))) {
            return;
        }
    }
}

/// A response body of chunks from a channel.
struct Chunks(mpsc::Receiver<Bytes>);

impl HttpBody for Chunks {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyFrame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| Ok(BodyFrame::data(piece))))
    }
}

/// pcapng encoder.
struct Encoder {
    writer: PcapNgWriter<Vec<u8>>,
    snap: u32,
    /// Number of interface description blocks written.
    described: usize,
    /// Missed frames reported so far.
    missed: u64,
    /// Frames left until `count` is reached.
    left: u64,
}

impl Encoder {
    fn new(snap: u32, count: u64) -> PcapResult<Encoder> {
        let application = Cow::Borrowed(concat!("vnetd ", env!("CARGO_PKG_VERSION")));
        let section = SectionHeaderBlock {
            endianness: Endianness::Big,
            options: vec![SectionHeaderOption::UserApplication(application)],
            ..SectionHeaderBlock::default()
        };
        let writer = PcapNgWriter::with_section_header(vec![], section)?;
        Ok(Encoder { writer, snap, described: 0, missed: 0, left: count })
    }

    /// Encodes the frames that the session captured since the last call.
    fn look(&mut self, session: &Session) -> PcapResult<Bytes> {
        let mut result = self.describe(&session.names());
        session.drain(|batched| {
            // Describe ports first that were added since the last call.
            let described = self.describe(&session.names()).and_then(|()| self.frames(batched));
            result = std::mem::replace(&mut result, Ok(())).and(described);
        });
        result?;
        self.statistics(session.missed())?;
        Ok(std::mem::take(self.writer.get_mut()).into())
    }

    fn describe(&mut self, names: &[String]) -> PcapResult<()> {
        for name in &names[self.described..] {
            let options = vec![
                InterfaceDescriptionOption::IfName(Cow::Borrowed(name.as_str())),
                // Timestamps in nanoseconds.
                InterfaceDescriptionOption::IfTsResol(9),
            ];
            let linktype = DataLink::ETHERNET;
            let block = InterfaceDescriptionBlock { linktype, snaplen: self.snap, options };
            self.writer.write_pcapng_block(block)?;
            self.described += 1;
        }
        Ok(())
    }

    fn frames(&mut self, batched: &Batched) -> PcapResult<()> {
        for (record, bytes) in batched.frames() {
            if self.left == 0 {
                break;
            }
            self.left -= 1;
            self.writer.write_pcapng_block(EnhancedPacketBlock {
                interface_id: record.place.into(),
                timestamp: record.at,
                original_len: record.len,
                data: Cow::Borrowed(bytes),
                options: options(record),
            })?;
        }
        Ok(())
    }

    fn statistics(&mut self, missed: u64) -> PcapResult<()> {
        if missed == self.missed || self.described == 0 {
            return Ok(());
        }
        self.missed = missed;
        self.writer.write_pcapng_block(InterfaceStatisticsBlock {
            // Lanes do not record which port missed a frame; report the total on the first interface.
            interface_id: 0,
            timestamp: capture::now().as_nanos() as u64,
            options: vec![InterfaceStatisticsOption::IsbIfDrop(missed)],
        })?;
        Ok(())
    }
}

fn options(record: &Record) -> Vec<EnhancedPacketOption<'static>> {
    let flags = if record.direction == Direction::In { INBOUND } else { OUTBOUND };
    let mut options = vec![EnhancedPacketOption::Flags(flags)];
    let mut comment = |text: String| options.push(EnhancedPacketOption::Comment(text.into()));
    if let Some(dropped) = record.dropped {
        let pieces = if dropped.pieces == 1 { String::new() } else { format!(", {} pieces", dropped.pieces) };
        comment(format!("dropped: {}{pieces}: {}", dropped.reason.name(), dropped.reason.help()));
    }
    if let Some(segment) = record.segment {
        comment(format!("super-frame of segments of {segment} bytes"));
    }
    if record.partial_checksum {
        comment("checksum left to be completed".into());
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use pcap_file::pcapng::{Block, PcapNgParser};
    use vnet::capture::{Dropped, Tap};
    use vnet::frame::PortId;
    use vnet::stats::DropReason;

    fn blocks(bytes: &[u8]) -> Vec<Block<'static>> {
        let (mut rest, mut parser) = PcapNgParser::new(bytes).unwrap();
        let mut blocks = vec![];
        while !rest.is_empty() {
            let (after, block) = parser.next_block(rest).unwrap();
            blocks.push(block.into_owned());
            rest = after;
        }
        blocks
    }

    fn session() -> Arc<Session> {
        let session = Arc::new(Session::new(Options::default(), 1));
        let _tap = Tap::new(session.clone(), [(PortId(0), "interface c1"), (PortId(3), "link h2")]);
        session
    }

    const RECORD: Record = Record {
        at: Duration::new(1_700_000_000, 123_456_789),
        place: 1,
        direction: Direction::Out,
        network: None,
        dropped: Some(Dropped { reason: DropReason::NoBuffer, pieces: 3 }),
        segment: Some(1448),
        partial_checksum: true,
        len: 4400,
        kept: 0,
    };

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_is_disconnected() {
        let (session, started) = (session(), tokio::time::Instant::now());
        // The channel has room for one chunk, which the section header fills.
        let (sender, _receiver) = mpsc::channel(1);
        let later = session.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(5)).await;
            later.lane(0).push_empty(RECORD);
        });
        feed(&session, u64::MAX, &sender).await;
        let lasted = started.elapsed();
        assert!(
            lasted >= STALL + Duration::from_secs(5) && lasted < STALL + Duration::from_secs(6),
            "{lasted:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_closed_connection_is_noticed_without_traffic() {
        let (session, started) = (session(), tokio::time::Instant::now());
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(5)).await;
            drop(receiver);
        });
        feed(&session, u64::MAX, &sender).await;
        assert!(started.elapsed() < Duration::from_secs(6));
    }

    #[test]
    fn a_capture_can_be_read_back() {
        let (session, record) = (session(), RECORD);
        session.lane(0).push_empty(record);
        session.lane(0).push_empty(Record { place: 0, direction: Direction::In, dropped: None, ..record });
        session.lane(0).push_empty(record);
        session.lane(0).miss(7);
        let mut encoder = Encoder::new(100, 2).unwrap();
        let bytes = encoder.look(&session).unwrap();
        assert_eq!(encoder.left, 0, "the third frame exceeds the count");
        let blocks = blocks(&bytes);
        let names: Vec<_> = blocks
            .iter()
            .filter_map(|block| match block {
                Block::InterfaceDescription(block) => Some((block.options[0].clone(), block.snaplen)),
                _ => None,
            })
            .collect();
        let name = |name: &'static str| (InterfaceDescriptionOption::IfName(name.into()), 100);
        assert_eq!(names, [name("interface c1"), name("link h2")]);
        let Block::EnhancedPacket(packet) = &blocks[2] else { panic!("{blocks:?}") };
        assert_eq!((packet.interface_id, packet.timestamp, packet.original_len), (1, record.at, 4400));
        assert_eq!(packet.options[0], EnhancedPacketOption::Flags(OUTBOUND));
        let comments: Vec<_> = packet.options[1..]
            .iter()
            .map(|option| match option {
                EnhancedPacketOption::Comment(text) => text.as_ref(),
                other => panic!("{other:?}"),
            })
            .collect();
        let why = format!("dropped: no_buffer, 3 pieces: {}", DropReason::NoBuffer.help());
        assert_eq!(
            comments,
            [&why, "super-frame of segments of 1448 bytes", "checksum left to be completed"]
        );
        let Some(Block::InterfaceStatistics(told)) = blocks.last() else { panic!("{blocks:?}") };
        assert_eq!(told.options, [InterfaceStatisticsOption::IsbIfDrop(7)]);
        assert!(encoder.look(&session).unwrap().is_empty(), "nothing new, nothing said");
    }
}
