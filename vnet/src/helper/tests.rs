use std::ffi::OsStr;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use proptest::prelude::*;

use super::message::{DESCRIPTORS_MAX, TEXT_MAX, encode_answer};
use super::*;
use crate::loader::{Attach, By, Pin};

/// A helper on a thread of this process, which needs to be root, and what asks it.
pub(super) fn helper() -> Helper {
    let (own, other) = pair().unwrap();
    std::thread::spawn(move || serve(&other));
    Helper { socket: Mutex::new(own), _process: None }
}

/// The only descriptor of an answer.
fn one(answer: io::Result<Vec<OwnedFd>>) -> OwnedFd {
    let [descriptor] = <[_; 1]>::try_from(answer.unwrap()).unwrap();
    descriptor
}

fn number(error: io::Error) -> Option<i32> {
    error.raw_os_error()
}

/// Whether the socket's namespace has a device of this name.
fn has_device(socket: &OwnedFd, name: &str) -> bool {
    name_to_index(socket, name).is_ok()
}

/// Makes a TAP of this name of which `tun` is the queue.
fn attach(tun: &File, name: &str) {
    // SAFETY: `ifreq` is plain data, for which all zeros is a valid value.
    let mut request = unsafe { std::mem::zeroed::<libc::ifreq>() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`: `request`, which lives across the call.
    assert_eq!(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) }, 0);
}

#[test]
fn requests_arrive_as_they_were_sent() {
    let path = || PathBuf::from(OsStr::from_bytes(b"/run/netns/\xff"));
    let kinds = Kind::ALL.map(Request::Socket);
    let others = [
        Request::Namespace(path()),
        Request::NewNamespace,
        Request::Tun,
        Request::DisableIpv6("eth0".into()),
        Request::Mount(path()),
        Request::Unmount(path()),
        Request::NamespaceWith(4, 1 << 40),
        Request::MapsPrivately(-1),
        Request::OwnPackets,
        Request::LoadPrograms(None),
        Request::LoadPrograms(Some(path())),
    ];
    let pins = [None, Some(Pin::Link), Some(Pin::Underlay)];
    let attach = |(by, pin)| {
        let (program, device) = ("from_guest".into(), ("eth0.7".into(), 1 << 20));
        Request::Attach(Attach { program, device, by, pin })
    };
    let attach = By::ALL.into_iter().flat_map(|by| pins.map(|pin| (by, pin))).map(attach);
    for request in kinds.into_iter().chain(others).chain(attach) {
        assert_eq!(Request::decode(&request.encode()), Some(request));
    }
    for wrong in
        [&b""[..], &[1, 0], &[2], &[2, 6], &[2, 0, 0], &[3, 3], &[4, 0xff], &[7, 0], &[11, 0], &[255, 1]]
    {
        assert_eq!(Request::decode(wrong), None, "{wrong:?}");
    }
    let attach = |by, pin, names: &[u8]| Request::decode(&[&[10, by, pin, 1, 0, 0, 0], names].concat());
    assert!(attach(0, 0, b"lo/ends").is_some());
    assert_eq!(attach(4, 0, b"lo/ends"), None, "no such way");
    assert_eq!(attach(0, 3, b"lo/ends"), None, "no such pin");
    assert_eq!(attach(0, 0, b"lo"), None, "no program");
    assert_eq!(attach(0, 0, b"\xff/ends"), None);
    assert_eq!(Request::decode(&[10, 0, 0, 1, 0, 0]), None);
    assert_eq!(Request::decode(&[8, 0]), None);
}

proptest! {
    /// An intruder in vnetd sends any bytes. Those that are a request are what vnetd would send for it, and nothing more.
    #[test]
    fn a_request_has_one_form(what in 0_u8..12, argument in prop::collection::vec(any::<u8>(), 0..24), slash in any::<bool>()) {
        let mut bytes = [&[what], &argument[..]].concat();
        bytes.extend(slash.then_some(b'/'));
        if let Some(request) = Request::decode(&bytes) {
            prop_assert_eq!(request.encode(), bytes);
        }
    }
}

#[test]
fn answers_have_a_number_or_a_text() {
    let answer = |done: io::Result<()>| decode_answer(&encode_answer(done.as_ref().map(drop)));
    assert!(answer(Ok(())).unwrap().is_ok());
    let refused = answer(Err(io::Error::from_raw_os_error(libc::EPERM))).unwrap().unwrap_err();
    assert_eq!(number(refused), Some(libc::EPERM));
    let refused = answer(Err(io::ErrorKind::InvalidInput.into())).unwrap().unwrap_err();
    assert_eq!(number(refused), Some(libc::EINVAL));
    let refused = answer(Err(io::Error::other("no such program"))).unwrap().unwrap_err();
    assert_eq!((refused.to_string(), refused.raw_os_error()), ("no such program".into(), None));
    // A longer text is cut between two characters.
    let long = format!("x{}", "\u{e4}".repeat(TEXT_MAX));
    let cut = encode_answer(Err(&io::Error::other(long.clone())));
    assert_eq!(cut.len(), ANSWER_MAX - 1);
    assert!(long.starts_with(&decode_answer(&cut).unwrap().unwrap_err().to_string()));
    for wrong in [&b""[..], &[0, 0, 0], &[0, 0, 0, 0, b'x']] {
        assert!(decode_answer(wrong).is_none(), "{wrong:?}");
    }
}

#[test]
fn a_message_has_few_descriptors() {
    let (here, there) = pair().unwrap();
    let most = vec![here.as_fd(); DESCRIPTORS_MAX];
    send(&here, b"x", &most).unwrap();
    let (len, passed) = receive(&there, &mut [0; 2]).unwrap();
    assert_eq!((len, passed.len()), (1, DESCRIPTORS_MAX));
    let more = [&most[..], &most].concat();
    assert!(send(&here, b"x", &more).is_err());
}

#[test]
fn sockets_and_queues_belong_to_the_namespace_that_is_passed() {
    let helper = helper();
    let there = one(helper.ask(&Request::NewNamespace, None));
    for kind in Kind::ALL {
        let socket = one(helper.ask(&Request::Socket(kind), Some(there.as_fd())));
        assert!(has_device(&socket, "lo"), "{kind:?}");
    }
    let own = one(helper.ask(&Request::OwnPackets, None));
    assert_eq!(rustix::net::sockopt::socket_domain(&own).unwrap(), AddressFamily::PACKET);
    let here = Kind::LOCAL.open().unwrap();
    let inside = one(helper.ask(&Request::Socket(Kind::LOCAL), Some(there.as_fd())));
    let tun = File::from(one(helper.ask(&Request::Tun, Some(there.as_fd()))));
    let name = "vnethelper0";
    attach(&tun, name);
    assert!(has_device(&inside, name) && !has_device(&here, name));
    helper.ask(&Request::DisableIpv6(name.into()), Some(there.as_fd())).unwrap();
    let value = entered(&there.into(), || {
        std::fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"))
    });
    assert!(value.unwrap().map_or(true, |value| value == "1\n"), "or the kernel has no IPv6");
}

#[test]
fn nothing_else_is_done() {
    let helper = helper();
    let there = one(helper.ask(&Request::NewNamespace, None));
    let ask = |request: Request, namespace: Option<BorrowedFd<'_>>| {
        number(helper.ask(&request, namespace).unwrap_err())
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    for path in [file.path(), Path::new("/proc/self/ns/pid"), Path::new("/etc/shadow")] {
        assert_eq!(ask(Request::Namespace(path.into()), None), Some(libc::EINVAL), "{path:?}");
    }
    assert_eq!(ask(Request::Namespace("/run/netns/no-such".into()), None), Some(libc::ENOENT));
    assert_eq!(ask(Request::NamespaceWith(0, 0), None), Some(libc::ENOENT));
    for kind in Kind::ALL {
        assert_eq!(ask(Request::Socket(kind), None), Some(libc::EINVAL), "no namespace");
    }
    assert_eq!(ask(Request::Socket(Kind::UDP), Some(file.as_file().as_fd())), Some(libc::EINVAL));
    for device in ["", "..", "../all", "a/b", "0123456789abcdef"] {
        assert_eq!(
            ask(Request::DisableIpv6(device.into()), Some(there.as_fd())),
            Some(libc::EINVAL),
            "{device}"
        );
    }
    assert_eq!(ask(Request::Unmount("/proc".into()), None), Some(libc::EINVAL));
    assert_eq!(ask(Request::Mount("/etc".into()), None), Some(libc::ENOTEMPTY));
    let socket = helper.socket.lock();
    send(&socket, b"\xff/bin/sh", &[]).unwrap();
    let mut room = [0; 4];
    receive(&socket, &mut room).unwrap();
    assert_eq!(i32::from_ne_bytes(room), libc::EINVAL);
    // One that is too long is refused before it is sent, and by the helper, which goes on.
    send(&socket, &vec![0; REQUEST_MAX + 1], &[]).unwrap();
    receive(&socket, &mut room).unwrap();
    assert_eq!(i32::from_ne_bytes(room), libc::EMSGSIZE);
    drop(socket);
    let long = PathBuf::from("/".repeat(REQUEST_MAX));
    assert_eq!(ask(Request::Namespace(long), None), Some(libc::ENAMETOOLONG));
    assert!(helper.ask(&Request::NewNamespace, None).is_ok());
}

#[test]
fn a_helper_that_has_ended_is_told() {
    let (own, other) = pair().unwrap();
    drop(other);
    let helper = Helper { socket: Mutex::new(own), _process: None };
    let error = helper.ask(&Request::NewNamespace, None).unwrap_err();
    assert!(error.to_string().contains("helper has ended"), "{error}");
}

#[test]
fn mappings_of_a_process_are_told() {
    let helper = helper();
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    let ask = |file: &File| {
        helper.ask(&Request::MapsPrivately(std::process::id() as i32), Some(file.as_fd())).map(|_| ())
    };
    assert_eq!(number(ask(&file).unwrap_err()), Some(libc::ENOENT));
    for (flags, answer) in [(libc::MAP_PRIVATE, Ok(())), (libc::MAP_SHARED, Err(Some(libc::EEXIST)))] {
        // SAFETY: a new mapping at an address that the kernel chooses; nothing uses it.
        let page =
            unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, flags, file.as_raw_fd(), 0) };
        assert_ne!(page, libc::MAP_FAILED);
        // Unknown for a while: other tests of this process map more than the helper reads.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let told = || ask(&file).map_err(number);
        let mut last = told();
        while last != answer && std::time::Instant::now() < end {
            last = told();
        }
        assert_eq!(last, answer);
        // SAFETY: mapped above; no pointer into it remains.
        unsafe { libc::munmap(page, 4096) };
    }
}
