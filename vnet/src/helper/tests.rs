use super::*;

/// A helper on a thread of this process, which needs to be root, and what asks it.
fn helper() -> Helper {
    let (own, other) = pair().unwrap();
    std::thread::spawn(move || serve(&other));
    Helper { socket: Mutex::new(own), _process: None }
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
    ];
    for request in kinds.into_iter().chain(others) {
        assert_eq!(Request::decode(&request.encode()), Some(request));
    }
    for wrong in [&b""[..], &[1, 0], &[2], &[2, 5], &[2, 0, 0], &[3, 3], &[4, 0xff], &[7, 0], &[255, 1]] {
        assert_eq!(Request::decode(wrong), None, "{wrong:?}");
    }
}

#[test]
fn sockets_and_queues_belong_to_the_namespace_that_is_passed() {
    let helper = helper();
    let there = helper.ask(&Request::NewNamespace, None).unwrap().unwrap();
    for kind in Kind::ALL {
        let socket = helper.ask(&Request::Socket(kind), Some(there.as_fd())).unwrap().unwrap();
        assert!(has_device(&socket, "lo"), "{kind:?}");
    }
    let here = Kind::LOCAL.open().unwrap();
    let inside = helper.ask(&Request::Socket(Kind::LOCAL), Some(there.as_fd())).unwrap().unwrap();
    let tun = File::from(helper.ask(&Request::Tun, Some(there.as_fd())).unwrap().unwrap());
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
    let there = helper.ask(&Request::NewNamespace, None).unwrap().unwrap();
    let ask = |request: Request, namespace: Option<BorrowedFd<'_>>| {
        number(helper.ask(&request, namespace).unwrap_err())
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    for path in [file.path(), Path::new("/proc/self/ns/pid"), Path::new("/etc/shadow")] {
        assert_eq!(ask(Request::Namespace(path.into()), None), Some(libc::EINVAL), "{path:?}");
    }
    assert_eq!(ask(Request::Namespace("/run/netns/no-such".into()), None), Some(libc::ENOENT));
    assert_eq!(ask(Request::NamespaceWith(0, 0), None), Some(libc::ENOENT));
    assert_eq!(ask(Request::Socket(Kind::UDP), None), Some(libc::EINVAL), "no namespace");
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
    send(&socket, b"\xff/bin/sh", None).unwrap();
    let mut room = [0; 4];
    receive(&socket, &mut room).unwrap();
    assert_eq!(i32::from_ne_bytes(room), libc::EINVAL);
    // One that is too long is refused before it is sent, and by the helper, which goes on.
    send(&socket, &vec![0; REQUEST_MAX + 1], None).unwrap();
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
