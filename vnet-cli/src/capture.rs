//! `vnet capture`: reads the stream of `POST /v1/capture` and writes it to a file, or prints a line for each frame.
//!
//! Only whole pcapng blocks are written, so the file is valid whether the capture ends by Ctrl-C, at the frame count, because a
//! pipe is closed, or because vnetd stops.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use hyper::Method;
use pcap_file::PcapError;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption;
use pcap_file::pcapng::blocks::interface_statistics::InterfaceStatisticsOption;
use pcap_file::pcapng::{Block, PcapNgParser};
use serde_json::json;

use crate::args::Capture;
use crate::client::{Client, Ended};
use crate::headers;
use crate::output::{Failure, print};

/// Prefix of the block comment that gives the drop reason.
const DROPPED: &str = "dropped: ";

/// Captures until the end and reports the frame count on standard error.
pub fn run(client: &Client<'_>, capture: &Capture, json: bool) -> Result<(), Failure> {
    let path = capture.path().unwrap_or_else(|usage| usage.exit());
    let mut reader = Reader::new(match &capture.write {
        Some(file) => Output::File(open(file)?, file.display().to_string()),
        None if json => Output::Json,
        None => Output::Lines,
    });
    let mut result = Ok(());
    let ended = client.stream(Method::POST, &path, |bytes| {
        result = reader.consume(bytes);
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
        Err(error) => Err(Failure::Lines(vec![format!("{}: cannot write: {error}", file.display())])),
    }
}

/// Destination of the frames.
enum Output {
    /// A pcapng file or pipe, with its name.
    File(Box<dyn Write>, String),
    /// One line per frame.
    Lines,
    /// One JSON object per frame.
    Json,
}

#[derive(Clone, Copy, Default)]
struct Totals {
    frames: u64,
    missed: u64,
}

/// Parses the pcapng stream.
struct Reader {
    output: Output,
    /// Bytes of an incomplete block.
    pending: Vec<u8>,
    parser: Option<PcapNgParser>,
    totals: Totals,
}

impl Reader {
    fn new(output: Output) -> Reader {
        Reader { output, pending: vec![], parser: None, totals: Totals::default() }
    }

    /// Processes the data up to the last complete block.
    fn consume(&mut self, bytes: &[u8]) -> Result<(), Failure> {
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
                    let line = format_block(&mut self.totals, parser, &block, &self.output);
                    text.extend(line);
                    after
                }),
            };
            match next {
                Ok(after) => rest = after,
                Err(PcapError::IncompleteBuffer) => break,
                Err(error) => {
                    let text = format!(
                        "vnetd did not send valid pcapng: {error}; is it the same version? (vnet version)"
                    );
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
            Output::Lines | Output::Json => print(&text),
        }
    }
}

/// Counts a block and formats it as a line.
fn format_block(
    totals: &mut Totals,
    parser: &PcapNgParser,
    block: &Block<'_>,
    output: &Output,
) -> Option<String> {
    match block {
        Block::EnhancedPacket(packet) => {
            totals.frames += 1;
            let name = parser.packet_interface(packet).and_then(|interface| {
                interface.options.iter().find_map(|option| match option {
                    InterfaceDescriptionOption::IfName(name) => Some(name.as_ref()),
                    _ => None,
                })
            });
            let frame = CapturedFrame::new(name.unwrap_or("?"), packet);
            match output {
                Output::File(..) => None,
                Output::Lines => Some(frame.line()),
                Output::Json => Some(frame.json()),
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
struct CapturedFrame<'a> {
    port: &'a str,
    at: Duration,
    inbound: bool,
    len: u32,
    /// Headers as text; `None` if no byte of the frame was kept.
    headers: Option<String>,
    comments: Vec<&'a str>,
}

impl<'a> CapturedFrame<'a> {
    fn new(port: &'a str, packet: &'a EnhancedPacketBlock<'_>) -> CapturedFrame<'a> {
        let mut frame = CapturedFrame {
            port,
            at: packet.timestamp,
            inbound: true,
            len: packet.original_len,
            headers: headers::line(&packet.data),
            comments: vec![],
        };
        for option in &packet.options {
            match option {
                EnhancedPacketOption::Flags(flags) => frame.inbound = flags & 3 != 2,
                EnhancedPacketOption::Comment(text) => frame.comments.push(text),
                _ => {}
            }
        }
        frame
    }

    fn direction(&self) -> &'static str {
        if self.inbound { "in" } else { "out" }
    }

    fn line(&self) -> String {
        let headers = self.headers.as_deref().unwrap_or("no headers captured");
        let comments: String = self.comments.iter().map(|comment| format!(" [{comment}]")).collect();
        let (clock, port, direction) = (clock(self.at), self.port, self.direction());
        format!("{clock} {port} {direction:3} {headers}, length {}{comments}\n", self.len)
    }

    fn json(&self) -> String {
        let dropped = self.comments.iter().find_map(|comment| {
            let reason = comment.strip_prefix(DROPPED)?;
            reason.split([',', ':']).next()
        });
        let line = json!({
            "time_ns": self.at.as_nanos() as u64,
            "at": self.port,
            "direction": self.direction(),
            "length": self.len,
            "headers": self.headers,
            "dropped": dropped,
            "comments": self.comments,
        });
        format!("{line}\n")
    }
}

/// Formats a time of day in UTC.
pub fn clock(at: Duration) -> String {
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

    /// The result does not depend on how the stream is split, and the file ends with a complete block.
    #[test]
    fn the_output_does_not_depend_on_read_sizes() {
        let stream = stream();
        for size in 1..stream.len() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("f");
            let mut reader = Reader::new(Output::File(open(&path).unwrap(), "f".into()));
            let mut taken = 0;
            for piece in stream.chunks(size) {
                reader.consume(piece).unwrap();
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
    fn each_frame_is_one_line() {
        let stream = stream();
        let (mut rest, mut parser) = PcapNgParser::new(&stream).unwrap();
        let mut totals = Totals::default();
        let mut lines = vec![String::new()];
        while !rest.is_empty() {
            let (after, block) = parser.next_block(rest).unwrap();
            lines.extend(format_block(&mut totals, &parser, &block, &Output::Lines));
            lines.extend(format_block(&mut totals, &parser, &block, &Output::Json));
            rest = after;
        }
        let macs = "ff:ff:ff:ff:ff:ff > ff:ff:ff:ff:ff:ff";
        assert_eq!(lines[1], format!("01:01:01.000005 link h2 in  {macs}, ethertype 0xffff, length 60\n"));
        assert_eq!(
            lines[3],
            "01:01:01.000005 link h2 out no headers captured, length 60 [dropped: no_route: No rule.]\n"
        );
        let json: serde_json::Value = serde_json::from_str(&lines[4]).unwrap();
        assert_eq!((&json["dropped"], &json["direction"]), (&json!("no_route"), &json!("out")));
    }

    #[test]
    fn invalid_pcapng_is_reported() {
        let mut reader = Reader::new(Output::Lines);
        assert!(matches!(reader.consume(&[7; 64]), Err(Failure::Lines(_))));
    }
}
