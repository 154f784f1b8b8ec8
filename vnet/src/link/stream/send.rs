//! Sends frames on a stream link's connections. Dispatchers call this; the stream thread never handles a frame.

use std::io;

use super::connection::Connection;
use crate::frame::{DropSink, Selection};
use crate::link::Link;
use crate::link::native::encode;
use crate::stats::DropReason;
use crate::wire::native::HOPS_MAX;
use crate::wire::stream::Prefix;

impl Link {
    /// Sends frames on the dialed connection, or on the accepted one if there is no dialed connection. Counts each frame as sent
    /// or dropped.
    pub(in crate::link) fn stream_send(&self, frames: Selection<'_>, drops: &mut DropSink) {
        let Some(stream) = self.stream() else { return };
        for slot in &stream.slots {
            let mut current = slot.connection.lock();
            if let Some(connection) = &mut *current {
                if let Err(error) = self.put_frames(connection, frames, drops) {
                    stream.close(&mut current, format!("the connection ended: {error}"));
                }
                return;
            }
        }
        drops.dropped_all(&self.stats, DropReason::NotReady, frames.which);
    }

    fn put_frames(
        &self,
        connection: &mut Connection,
        selection: Selection<'_>,
        drops: &mut DropSink,
    ) -> io::Result<()> {
        let (mut frames, mut bytes) = (0, 0);
        let mut result = Ok(());
        for (index, frame) in selection.frames() {
            if frame.hops > HOPS_MAX {
                drops.dropped(&self.stats, DropReason::HopLimit, index, 1);
                continue;
            }
            let header = encode::header(frame, None, self.take_numbers(1));
            let prefix = Prefix::new(&header, &frame.offload, frame.len());
            result = result.and_then(|()| connection.make_room(prefix.bytes().len() + frame.len()));
            if result.is_err() {
                drops.dropped(&self.stats, DropReason::SendFailed, index, 1);
            } else if connection.put(prefix.bytes(), frame.len(), |to| _ = selection.batch.copy_to(frame, to))
            {
                frames += 1;
                bytes += frame.len() as u64;
            } else {
                drops.dropped(&self.stats, DropReason::NoBuffer, index, 1);
            }
        }
        self.stats.delivered(frames, bytes);
        self.stats.out_datagrams.add(frames);
        result.and_then(|()| connection.flush())
    }
}
