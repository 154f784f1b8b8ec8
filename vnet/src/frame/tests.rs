use super::*;
use proptest::prelude::*;

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256) as u8).collect()
}

proptest! {
    /// Head and bytes of a frame are the same however it is divided into segments, stable or not.
    #[test]
    fn segmentation_does_not_matter(len in 14usize..3000, cuts in prop::collection::vec(0usize..3000, 0..8), stable: bool) {
        let data = bytes(len);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(len)).chain([0, len]).collect();
        cuts.sort_unstable();
        let mut batch = Batch::new();
        for round in 0..2 {
            let mut builder = batch.begin();
            for pair in cuts.windows(2) {
                let part = &data[pair[0]..pair[1]];
                let segment = Segment::new(part.as_ptr(), part.len());
                // SAFETY: `data` outlives the batch and is not written to.
                unsafe { if stable { builder.push_stable(segment) } else { builder.push(segment) } };
            }
            builder.finish(PortId(3), NetworkId::DEFAULT, Offload::default(), 0).unwrap();
            let frame = *batch.frame(round);
            prop_assert_eq!(frame.len(), len);
            prop_assert!(batch.head(&frame).len() >= len.min(HEAD_MAX));
            prop_assert_eq!(&batch.head(&frame)[..len.min(HEAD_MAX)], &data[..len.min(HEAD_MAX)]);
            let mut out = vec![0; len];
            prop_assert_eq!(batch.copy_to(&frame, &mut out), len);
            prop_assert_eq!(&out, &data);
            let mut prefix = vec![9];
            prop_assert_eq!(batch.append_to(&frame, len / 2, &mut prefix), len / 2);
            prop_assert_eq!(&prefix[1..], &data[..len / 2]);
            prop_assert_eq!(batch.append_to(&frame, usize::MAX, &mut prefix), len);
        }
    }
}

#[test]
fn refused_frames_leave_the_batch_unchanged() {
    let data = vec![0u8; FRAME_MAX + 1];
    let mut batch = Batch::new();
    for (len, error) in [(13, FrameError::TooShort), (FRAME_MAX + 1, FrameError::TooLong)] {
        let mut builder = batch.begin();
        // SAFETY: `data` outlives the batch and is not written to.
        unsafe { builder.push(Segment::new(data.as_ptr(), len)) };
        assert_eq!(builder.finish(PortId(0), NetworkId::DEFAULT, Offload::default(), 0), Err(error));
        assert!(batch.is_empty() && batch.segments.is_empty());
    }
}

#[test]
fn a_slot_is_held_until_the_last_hold_is_gone() {
    let holds = Holds::new(4);
    let first = Hold::new(&holds, 1).unwrap();
    let second = Hold::new(&holds, 1).unwrap();
    let other = Hold::new(&holds, 3).unwrap();
    assert!(Hold::new(&holds, 4).is_none());
    drop(first);
    assert!(holds.is_held(1) && holds.is_held(3) && !holds.is_held(0) && !holds.is_held(9));
    drop(second);
    assert!(!holds.is_held(1) && holds.any());
    std::thread::spawn(move || drop(other)).join().unwrap();
    assert!(!holds.any() && !holds.is_held(3));
}
