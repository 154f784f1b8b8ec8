//! What this thread drops, told apart frame by frame, for as long as somebody captures.
//!
//! Counters say how many; a capture wants to know which. Ports are not told about captures: while a dispatcher watches, every
//! drop that is counted on its thread is noted here too, and the dispatcher, which knows what it was doing, takes the notes.
//! When nobody watches, a drop costs one look at a flag of this thread, and a frame that is delivered nothing.

use std::cell::{Cell, RefCell};

use super::{DropReason, PortStats};

/// Notes kept between two looks: a batch's frames, as many refused ones, and segments of one super-frame.
const NOTES_MAX: usize = 256;

/// One count under a reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Note {
    /// Where it was counted: the address of the port's counters.
    pub port: usize,
    /// Under which reason.
    pub reason: DropReason,
    /// How many frames.
    pub frames: u64,
    /// Bytes of a frame that never became one in a batch; 0 for others.
    pub bytes: u64,
    /// Refused as it entered.
    pub refused: bool,
}

struct Notes {
    list: [Option<Note>; NOTES_MAX],
    len: usize,
    lost: u64,
}

thread_local! {
    static WATCHING: Cell<bool> = const { Cell::new(false) };
    static NOTES: RefCell<Notes> = const { RefCell::new(Notes { list: [None; NOTES_MAX], len: 0, lost: 0 }) };
}

/// Starts or ends watching on this thread.
pub fn set(on: bool) {
    WATCHING.set(on);
    if !on {
        take(|_| ());
    }
}

/// Whether this thread watches.
#[inline]
pub(super) fn is_on() -> bool {
    WATCHING.get()
}

#[cold]
pub(super) fn note(port: &PortStats, reason: DropReason, frames: u64, refused: Option<u64>) {
    let port = address(port);
    NOTES.with_borrow_mut(|notes| {
        let note = Note { port, reason, frames, bytes: refused.unwrap_or(0), refused: refused.is_some() };
        match notes.list.get_mut(notes.len) {
            Some(place) => {
                *place = Some(note);
                notes.len += 1;
            }
            None => notes.lost += frames,
        }
    });
}

/// What names a port in its notes.
pub fn address(port: &PortStats) -> usize {
    std::ptr::from_ref(port).addr()
}

/// Gives the notes made since the last call, in order, and forgets them. Returns how many frames there was no room for.
pub fn take(mut each: impl FnMut(Note)) -> u64 {
    NOTES.with_borrow_mut(|notes| {
        let len = std::mem::take(&mut notes.len);
        notes.list[..len].iter().flatten().for_each(|note| each(*note));
        std::mem::take(&mut notes.lost)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_are_noted_only_while_somebody_watches_and_only_so_many() {
        let stats = PortStats::default();
        stats.drop_frames(DropReason::NoRoute, 1);
        set(true);
        stats.drop_frames(DropReason::NoBuffer, 2);
        stats.drop_frames(DropReason::NoBuffer, 0);
        stats.refuse(DropReason::BadChain, 99);
        let mut seen = vec![];
        assert_eq!(
            take(|note| seen.push((note.port, note.reason, note.frames, note.bytes, note.refused))),
            0
        );
        let here = address(&stats);
        assert_eq!(
            seen,
            [(here, DropReason::NoBuffer, 2, 0, false), (here, DropReason::BadChain, 1, 99, true)]
        );
        (0..NOTES_MAX + 5).for_each(|_| stats.drop_frames(DropReason::NoRoute, 1));
        let mut count = 0;
        assert_eq!((take(|_| count += 1), count), (5, NOTES_MAX));
        stats.drop_frames(DropReason::NoRoute, 1);
        set(false);
        assert_eq!(take(|_| panic!("forgotten")), 0);
    }
}
