//! `vnet capture`: reads the stream of `POST /v1/capture`, into a file as it comes or as a line for each frame.
//!
//! Only whole pcapng blocks are written or shown, so that a file can be read wherever the capture ended: by Ctrl-C, by the count,
//! by a reader of the pipe who has had enough, or with vnetd.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use pcap_file::PcapError;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption;
use pcap_file::pcapng::blocks::interface_statistics::InterfaceStatisticsOption;
use pcap_file::pcapng::{Block, PcapNgParser};
use serde_json::json;
use vnet::capture::Packet;

use crate::Failure;
use crate::args::Capture;
use crate::client::{Client, Ended};

/// Why a frame was dropped, in the comment of its block.
const DROPPED: &str = "dropped: ";

/// Captures until it ends, and says on standard error how much that was.
pub fn run(client: &Client<'_>, capture: &Capture, json: bool) -> Result<(), Failure> {
    let mut reader = Reader::new(match &capture.write {
        Some(file) => Output::File(open(file)?, file.display().to_string()),
        None if json => Output::Json,
        None => Output::Lines,
    });
    let mut result = Ok(());
    let ended = client.stream(&capture.path(), |bytes| {
        result = reader.take(bytes);
        result.is_ok()
    })?;
    let Totals { frames, missed } = reader.totals;
    eprintln!("{frames} frames captured, {missed} missed");
    result?;
    if ended == Ended::Server && Some(frames) != capture.count {
        return Err(Failure::Lines(vec!["vnetd ended the capture; see its log".into()]));
    }
    Ok(())
}

fn open(file: &Path) -> Result<Box<dyn Write>, Failure> {
    if file == Path::new("-") {
        return Ok(Box::new(io::stdout()));
    }
    match File::create(file) {
        Ok(file) => Ok(Box::new(file)),
        Err(error) => Err(Failure::Lines(vec![format!("{}: cannot write there: {error}", file.display())])),
    }
}

/// Where frames go.
enum Output {
    /// A pcapng file, or a pipe, with its name.
    File(Box<dyn Write>, String),
    /// A line each.
    Lines,
    /// A JSON object each.
    Json,
}

#[derive(Clone, Copy, Default)]
struct Totals {
    frames: u64,
    missed: u64,
}

/// Takes the stream apart.
struct Reader {
    output: Output,
    /// Bytes that came and are not used yet: less than a block between two calls.
    pending: Vec<u8>,
    parser: Option<PcapNgParser>,
    totals: Totals,
}

impl Reader {
    fn new(output: Output) -> Reader {
        Reader { output, pending: vec![], parser: None, totals: Totals::default() }
    }

    /// Uses what came, up to the last whole block.
    fn take(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.pending.extend_from_slice(bytes);
        let pending = std::mem::take(&mut self.pending);
        let mut rest = &pending[..];
        let mut text = String::new();
        loop {
            let next = match &mut self.parser {
                None => PcapNgParser::new(rest).map(|(after, parser)| {
                    self.parser = Some(parser);
                    after
                }),
                Some(parser) => parser.next_block(rest).map(|(after, block)| {
                    let line = see(&mut self.totals, parser, &block, &self.output);
                    text.extend(line);
                    after
                }),
            };
            match next {
                Ok(after) => rest = after,
                Err(PcapError::IncompleteBuffer) => break,
                Err(error) => {
                    let text =
                        format!("vnetd sends no pcapng: {error}; is it the same version? (vnet version)");
                    return Err(Failure::Lines(vec![text]));
                }
            }
        }
        let used = pending.len() - rest.len();
        self.pending = rest.to_vec();
        match &mut self.output {
            Output::File(file, name) => {
                let written = file.write_all(&pending[..used]).and_then(|()| file.flush());
                written.map_err(|error| match error.kind() {
                    io::ErrorKind::BrokenPipe => Failure::NobodyReads,
                    _ => Failure::Lines(vec![format!("{name}: cannot write: {error}")]),
                })
            }
            Output::Lines | Output::Json => crate::print(&text),
        }
    }
}

/// Counts a block, and gives its line.
fn see(totals: &mut Totals, parser: &PcapNgParser, block: &Block<'_>, output: &Output) -> Option<String> {
    match block {
        Block::EnhancedPacket(packet) => {
            totals.frames += 1;
            let name = parser.packet_interface(packet).and_then(|interface| {
                interface.options.iter().find_map(|option| match option {
                    InterfaceDescriptionOption::IfName(name) => Some(name.as_ref()),
                    _ => None,
                })
            });
            let seen = Seen::new(name.unwrap_or("?"), packet);
            match output {
                Output::File(..) => None,
                Output::Lines => Some(seen.line()),
                Output::Json => Some(seen.json()),
            }
        }
        Block::InterfaceStatistics(statistics) => {
            for option in &statistics.options {
                if let InterfaceStatisticsOption::IsbIfDrop(missed) = option {
                    totals.missed = *missed;
                }
            }
            None
        }
        _ => None,
    }
}

/// A captured frame.
struct Seen<'a> {
    place: &'a str,
    at: Duration,
    inbound: bool,
    len: u32,
    /// Its headers for people; nothing when no byte of it was kept.
    headers: Option<String>,
    comments: Vec<&'a str>,
}

impl<'a> Seen<'a> {
    fn new(place: &'a str, packet: &'a EnhancedPacketBlock<'_>) -> Seen<'a> {
        let mut seen = Seen {
            place,
            at: packet.timestamp,
            inbound: true,
            len: packet.original_len,
            headers: Packet::new(&packet.data).map(|headers| headers.to_string()),
            comments: vec![],
        };
        for option in &packet.options {
            match option {
                EnhancedPacketOption::Flags(flags) => seen.inbound = flags & 3 != 2,
                EnhancedPacketOption::Comment(text) => seen.comments.push(text),
                _ => {}
            }
        }
        seen
    }

    fn direction(&self) -> &'static str {
        if self.inbound { "in" } else { "out" }
    }

    fn line(&self) -> String {
        let headers = self.headers.as_deref().unwrap_or("refused before it was a frame");
        let comments: String = self.comments.iter().map(|comment| format!(" [{comment}]")).collect();
        let (clock, place, direction) = (clock(self.at), self.place, self.direction());
        format!("{clock} {place} {direction:3} {headers}, length {}{comments}\n", self.len)
    }

    fn json(&self) -> String {
        let dropped = self.comments.iter().find_map(|comment| {
            let reason = comment.strip_prefix(DROPPED)?;
            reason.split([',', ':']).next()
        });
        let line = json!({
            "time_ns": self.at.as_nanos() as u64,
            "at": self.place,
            "direction": self.direction(),
            "length": self.len,
            "headers": self.headers,
            "dropped": dropped,
            "comments": self.comments,
        });
        format!("{line}\n")
    }
}

/// The time of day in UTC.
fn clock(at: Duration) -> String {
    let s = at.as_secs();
    format!("{:02}:{:02}:{:02}.{:06}", s / 3600 % 24, s / 60 % 60, s % 60, at.subsec_micros())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pcap_file::pcapng::PcapNgWriter;
    use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionBlock;
    use pcap_file::pcapng::blocks::interface_statistics::InterfaceStatisticsBlock;
    use pcap_file::pcapng::blocks::section_header::SectionHeaderBlock;
    use pcap_file::{DataLink, Endianness};

    fn stream() -> Vec<u8> {
        let section = SectionHeaderBlock { endianness: Endianness::Big, ..SectionHeaderBlock::default() };
        let mut writer = PcapNgWriter::with_section_header(vec![], section).unwrap();
        let mut interface = InterfaceDescriptionBlock::new(DataLink::ETHERNET, 0);
        interface.options = vec![
            InterfaceDescriptionOption::IfName("link h2".into()),
            InterfaceDescriptionOption::IfTsResol(9),
        ];
        writer.write_pcapng_block(interface).unwrap();
        for (data, options) in [
            (&[0xff; 14][..], vec![EnhancedPacketOption::Flags(1)]),
            (
                &[],
                vec![
                    EnhancedPacketOption::Flags(2),
                    EnhancedPacketOption::Comment("dropped: no_route: No rule.".into()),
                ],
            ),
        ] {
            let timestamp = Duration::new(3661, 5000);
            let packet = EnhancedPacketBlock {
                interface_id: 0,
                timestamp,
                original_len: 60,
                data: data.into(),
                options,
            };
            writer.write_pcapng_block(packet).unwrap();
        }
        let options = vec![InterfaceStatisticsOption::IsbIfDrop(7)];
        writer
            .write_pcapng_block(InterfaceStatisticsBlock { interface_id: 0, timestamp: 0, options })
            .unwrap();
        writer.into_inner()
    }

    /// However the stream is cut into pieces, the same is made of it, and a file ends with a whole block.
    #[test]
    fn pieces_of_any_size_make_the_same() {
        let stream = stream();
        for size in 1..stream.len() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("f");
            let mut reader = Reader::new(Output::File(open(&path).unwrap(), "f".into()));
            let mut taken = 0;
            for piece in stream.chunks(size) {
                reader.take(piece).unwrap();
                taken += piece.len();
                let written = std::fs::read(&path).unwrap();
                assert_eq!(written.len() + reader.pending.len(), taken);
                assert!(stream.starts_with(&written));
            }
            assert_eq!((reader.totals.frames, reader.totals.missed), (2, 7));
            assert_eq!(std::fs::read(&path).unwrap(), stream);
        }
    }

    #[test]
    fn a_frame_is_a_line() {
        let stream = stream();
        let (mut rest, mut parser) = PcapNgParser::new(&stream).unwrap();
        let mut totals = Totals::default();
        let mut lines = vec![String::new()];
        while !rest.is_empty() {
            let (after, block) = parser.next_block(rest).unwrap();
            lines.extend(see(&mut totals, &parser, &block, &Output::Lines));
            lines.extend(see(&mut totals, &parser, &block, &Output::Json));
            rest = after;
        }
        let macs = "ff:ff:ff:ff:ff:ff > ff:ff:ff:ff:ff:ff";
        assert_eq!(lines[1], format!("01:01:01.000005 link h2 in  {macs}, ethertype 0xffff, length 60\n"));
        assert_eq!(
            lines[3],
            "01:01:01.000005 link h2 out refused before it was a frame, length 60 [dropped: no_route: No rule.]\n"
        );
        let json: serde_json::Value = serde_json::from_str(&lines[4]).unwrap();
        assert_eq!((&json["dropped"], &json["direction"]), (&json!("no_route"), &json!("out")));
    }

    #[test]
    fn what_is_no_pcapng_is_said() {
        let mut reader = Reader::new(Output::Lines);
        assert!(matches!(reader.take(&[7; 64]), Err(Failure::Lines(_))));
    }
}
