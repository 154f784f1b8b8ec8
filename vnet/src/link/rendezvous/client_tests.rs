use std::net::TcpListener;

use super::*;

const KEY: [u8; KEY_LEN] = [7; KEY_LEN];

fn registration() -> Registration {
    Registration { id: *b"side-one", number: 0x0102_0304_0506_0708, other: None, is_answer: false }
}

#[test]
fn messages_are_laid_out_as_documented() {
    let ticket = Ticket { port: 9001, id: *b"side-one", key: KEY };
    let open = [&[2, 0, 0, 42, 0x23, 0x29], &b"side-one"[..], &KEY].concat();
    for (message, bytes) in [
        (RendezvousMessage::Meet("h2".into()), vec![1, 0, 0, 2, b'h', b'2']),
        (RendezvousMessage::Open(ticket), open),
        (RendezvousMessage::Refuse("no".into()), vec![3, 0, 0, 2, b'n', b'o']),
    ] {
        assert_eq!(message.to_bytes(), bytes);
        assert_eq!(RendezvousMessage::read(&mut &bytes[..]).unwrap(), message);
    }
}

#[test]
fn malformed_messages_are_refused() {
    for bytes in [
        &[1, 0, 0, 0][..],
        &[1, 1, 0, 2, b'h', b'2'],
        &[1, 0, 0, 2, b'h'],
        &[1, 0, 0, 1, 0xff],
        &[1, 0, 0, 254],
        &[2, 0, 0, 41],
        &[3, 0, 2, 1],
        &[4, 0, 0, 0],
        &[],
    ] {
        assert!(RendezvousMessage::read(&mut &bytes[..]).is_err(), "{bytes:?}");
    }
    let told = RendezvousMessage::read(&mut &[3, 0, 0, 3, b'a', 7, b'b'][..]).unwrap();
    assert_eq!(told, RendezvousMessage::Refuse("a\u{fffd}b".into()), "no control characters");
}

#[test]
fn registrations_are_laid_out_as_documented() {
    let bytes = registration().to_bytes(&KEY);
    assert_eq!(&bytes[..24], b"vnet-viaside-one\x01\x02\x03\x04\x05\x06\x07\x08");
    assert_eq!((&bytes[24..42], &bytes[42..48]), (&[0; 18][..], &[1, 0, 0, 0, 0, 0][..]));
    let other = Some("192.0.2.1:9000".parse().unwrap());
    let answer = Registration { other, is_answer: true, ..registration() };
    let bytes = answer.to_bytes(&KEY);
    assert_eq!(&bytes[24..43], b"\0\0\0\0\0\0\0\0\0\0\xff\xff\xc0\0\x02\x01\x23\x28\x02");
    assert_eq!(Registration::read(&bytes, &KEY), Some(answer));
}

#[test]
fn a_modified_registration_is_refused() {
    let good = registration().to_bytes(&KEY);
    assert_eq!(Registration::read(&good, &KEY), Some(registration()));
    assert_eq!(Registration::read(&good, &[8; KEY_LEN]), None);
    for bit in 0..8 * REGISTRATION_LEN {
        let mut bad = good;
        bad[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(Registration::read(&bad, &KEY), None, "bit {bit}");
    }
    for len in 0..REGISTRATION_LEN {
        assert!(!Registration::is_one(&good[..len]));
    }
}

/// However much data arrives at once, a read never goes beyond a record.
#[test]
fn records_are_read_one_by_one() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    near.write_all(&[&[23, 3, 3, 0, 3], &b"one"[..], &[23, 3, 3, 0, 0], b"rest"].concat()).unwrap();
    let mut records = Records::new(far);
    let mut buffer = [0; 100];
    let mut read = || records.read(&mut buffer).map(|count| buffer[..count].to_vec()).unwrap();
    assert_eq!(read(), [23, 3, 3, 0, 3]);
    assert_eq!(read(), b"one");
    assert_eq!(read(), [23, 3, 3, 0, 0]);
    let mut rest = [0; 4];
    records.stream.read_exact(&mut rest).unwrap();
    assert_eq!(&rest, b"rest");
}
