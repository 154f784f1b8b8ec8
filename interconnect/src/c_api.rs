//! The C interface that `include/vnet_rdma.h` declares, except for polling and waiting (`c_wait.rs`), counters
//! (`c_counters.rs`), and settings (`c_settings.rs`).
//!
//! Pointers come from C: the header states the requirements of each function, and each function rejects null pointers.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

use crate::attached::{Endpoint, Node};
use crate::c_settings;
use crate::c_types::{BUFFERED, CAtomic, CCompletion, CPeer, DATA, DISCARD, QUIET, TAGGED};
use crate::node::{Error, Options, resolve};
use crate::proto::{
    Access, Atomic, Change, Completion, Datatype, Kind, Match, Outgoing, PostError, Receive, Shape, Span,
    Status,
};
use crate::region::Region;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

pub(crate) fn remember(text: &str) {
    LAST.with(|last| *last.borrow_mut() = CString::new(text).unwrap_or_default());
}

pub(crate) fn code(error: &Error) -> c_int {
    remember(&error.to_string());
    match error {
        Error::Socket(_, error) | Error::Memory(error) => -error.raw_os_error().unwrap_or(libc::EIO),
        Error::Name(..)
        | Error::Range(..)
        | Error::Attachment(_)
        | Error::NoBounce
        | Error::Seal(_)
        | Error::Streams(_)
        | Error::OwnDevice(_)
        | Error::OtherWire(_)
        | Error::Refused(PostError::BadAtomic | PostError::BadShare) => -libc::EINVAL,
        Error::Refused(PostError::Busy) => -libc::EAGAIN,
        Error::Refused(PostError::NoEndpoint | PostError::UnknownKey) => -libc::ENOENT,
        Error::Refused(PostError::Taken) => -libc::EADDRINUSE,
        Error::Refused(PostError::NoRegion) => -libc::ENOMEM,
        Error::Daemon(_) => -libc::ENOTCONN,
        Error::Device(_, refusal) => -refusal.errno(),
        Error::NotSealed(_) | Error::Unpermitted(_) => -libc::EPERM,
        Error::Foreign => -libc::EFAULT,
    }
}

fn result(result: Result<(), Error>) -> c_int {
    result.map_or_else(|error| code(&error), |()| 0)
}

pub(crate) fn invalid(what: &str) -> c_int {
    remember(what);
    -libc::EINVAL
}

/// Returns the text behind a pointer from C, or `None` if the pointer is null or the text is not UTF-8.
///
/// # Safety
/// The pointer is null, or points to a null-terminated string that does not change during the call.
unsafe fn text<'a>(pointer: *const c_char) -> Option<&'a str> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the pointer is not null, and the caller guarantees a string.
    unsafe { CStr::from_ptr(pointer) }.to_str().ok()
}

/// Creates the span of an operation. The header obliges C programs to fulfil the contract of `Span::new`.
fn span(start: *const c_void, len: usize) -> Span {
    if len == 0 {
        return Span::EMPTY;
    }
    // SAFETY: the header requires the program to keep the memory mapped and not to access it until the operation is complete.
    unsafe { Span::new(start.cast_mut().cast(), len) }
}

/// Returns the calling thread's last error text.
#[unsafe(no_mangle)]
pub extern "C" fn vnet_rdma_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

/// Returns the description of a status.
#[unsafe(no_mangle)]
pub extern "C" fn vnet_rdma_status_text(status: u32) -> *const c_char {
    let status = u8::try_from(status).ok().and_then(Status::from_number);
    remember(&status.map_or("unknown status".into(), |status| status.to_string()));
    vnet_rdma_error()
}

/// Opens a node.
///
/// # Safety
/// `bind` is null or a string; `node` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_open(bind: *const c_char, node: *mut *mut Node) -> c_int {
    let mut options = Options::default();
    c_settings::apply(&mut options);
    if !bind.is_null() {
        // SAFETY: the pointer is not null, and the caller guarantees a string.
        match unsafe { text(bind) }.map(str::parse) {
            Some(Ok(bind)) => options.bind = bind,
            Some(Err(error)) => return invalid(&error.to_string()),
            None => return invalid("the address to bind is none: write ADDRESS:PORT or ether://DEVICE:PORT"),
        }
    }
    if node.is_null() {
        return invalid("no place for the node");
    }
    match Node::open(&options) {
        Ok(opened) => {
            // SAFETY: the pointer is not null, and the caller guarantees that it is writable.
            unsafe { node.write(Box::into_raw(Box::new(opened))) };
            0
        }
        Err(error) => code(&error),
    }
}

/// Closes a node.
///
/// # Safety
/// `node` is null, or comes from `vnet_rdma_open` and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_close(node: *mut Node) {
    if !node.is_null() {
        // SAFETY: the pointer comes from `Box::into_raw`, and the caller transfers its ownership.
        drop(unsafe { Box::from_raw(node) });
    }
}

/// Returns the port of a node.
///
/// # Safety
/// `node` is null or an open node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_port(node: *const Node) -> u16 {
    // SAFETY: the caller guarantees that the pointer is null or open.
    unsafe { node.as_ref() }.map_or(0, |node| node.address().port())
}

/// Opens an endpoint.
///
/// # Safety
/// `node` is null or an open node; `endpoint` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_endpoint_open(
    node: *mut Node,
    number: c_int,
    endpoint: *mut *mut Endpoint,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(node) = unsafe { node.as_ref() }.filter(|_| !endpoint.is_null()) else {
        return invalid("no node, or no place for the endpoint");
    };
    match node.endpoint(u16::try_from(number).ok()) {
        Ok(opened) => {
            // SAFETY: the pointer is not null, and the caller guarantees that it is writable.
            unsafe { endpoint.write(Box::into_raw(Box::new(opened))) };
            0
        }
        Err(error) => code(&error),
    }
}

/// Sets an endpoint's share of what its node sends.
///
/// # Safety
/// `endpoint` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_endpoint_share(endpoint: *mut Endpoint, weight: u32, rate: u64) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(endpoint) = (unsafe { endpoint.as_ref() }) else { return invalid("no endpoint") };
    endpoint.set_share(weight, rate).map_or_else(|error| code(&error), |()| 0)
}

/// Closes an endpoint.
///
/// # Safety
/// `endpoint` is null, or comes from `vnet_rdma_endpoint_open` and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_endpoint_close(endpoint: *mut Endpoint) {
    if !endpoint.is_null() {
        // SAFETY: the pointer comes from `Box::into_raw`, and the caller transfers its ownership.
        drop(unsafe { Box::from_raw(endpoint) });
    }
}

/// Returns the number of an endpoint.
///
/// # Safety
/// `endpoint` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_endpoint_number(endpoint: *const Endpoint) -> u16 {
    // SAFETY: the caller guarantees that the pointer is null or open.
    unsafe { endpoint.as_ref() }.map_or(0, Endpoint::number)
}

/// Parses the name of an endpoint.
///
/// # Safety
/// `name` is null or a string; `peer` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_resolve(name: *const c_char, peer: *mut CPeer) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or a string.
    let Some(name) = unsafe { text(name) }.filter(|_| !peer.is_null()) else {
        return invalid("no name, or no place for the peer");
    };
    match resolve(name) {
        Ok(found) => {
            // SAFETY: the pointer is not null, and the caller guarantees that it is writable.
            unsafe { peer.write(found.into()) };
            0
        }
        Err(error) => code(&error),
    }
}

/// Whether two peers are the same endpoint.
///
/// # Safety
/// Both pointers are null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_same_peer(a: *const CPeer, b: *const CPeer) -> c_int {
    // SAFETY: the caller guarantees that both pointers are null or readable.
    let peers = unsafe { (a.as_ref(), b.as_ref()) };
    c_int::from(matches!(peers, (Some(a), Some(b)) if a.peer().is_some() && a.peer() == b.peer()))
}

fn access_of(access: u32) -> Access {
    Access { read: access & 1 != 0, write: access & 2 != 0 }
}

/// Registers memory.
///
/// # Safety
/// `endpoint` is null or open, `key` is null or writable; the memory stays mapped until it is deregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_register(
    endpoint: *mut Endpoint,
    start: *mut c_void,
    len: usize,
    access: u32,
    key: *mut u64,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(endpoint) = unsafe { endpoint.as_ref() }.filter(|_| !key.is_null()) else {
        return invalid("no endpoint, or no place for the key");
    };
    match endpoint.register(span(start, len), access_of(access)) {
        Ok(registered) => {
            // SAFETY: the pointer is not null, and the caller guarantees that it is writable.
            unsafe { key.write(registered) };
            0
        }
        Err(error) => code(&error),
    }
}

/// Allocates memory and registers it.
///
/// # Safety
/// `endpoint` is null or open; `start` and `key` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_allocate(
    endpoint: *mut Endpoint,
    len: usize,
    access: u32,
    start: *mut *mut c_void,
    key: *mut u64,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(endpoint) = unsafe { endpoint.as_ref() }.filter(|_| !start.is_null() && !key.is_null()) else {
        return invalid("no endpoint, or no place for the memory or the key");
    };
    let region = Region::new(endpoint, len, access_of(access));
    match region.and_then(|region| Ok((region.span(0, len)?.start(), region.key()))) {
        Ok((memory, registered)) => {
            // SAFETY: the pointers are not null, and the caller guarantees that they are writable.
            unsafe {
                start.write(memory.cast());
                key.write(registered);
            }
            0
        }
        Err(error) => code(&error),
    }
}

/// Registers memory under a key that the program chooses.
///
/// # Safety
/// `endpoint` is null or open; the memory stays mapped until it is deregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_register_at(
    endpoint: *mut Endpoint,
    start: *mut c_void,
    len: usize,
    access: u32,
    base: u64,
    key: u64,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(endpoint) = (unsafe { endpoint.as_ref() }) else { return invalid("no endpoint") };
    result(endpoint.register_at(span(start, len), base, access_of(access), Some(key)).map(|_| ()))
}

/// Deregisters memory.
///
/// # Safety
/// `endpoint` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_deregister(endpoint: *mut Endpoint, key: u64) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(endpoint) = (unsafe { endpoint.as_ref() }) else { return invalid("no endpoint") };
    result(endpoint.deregister(key))
}

/// # Safety
/// `endpoint` is null or open; `peer` is null or readable.
unsafe fn post(endpoint: *mut Endpoint, peer: *const CPeer, out: &Outgoing) -> c_int {
    // SAFETY: the caller guarantees valid pointers and memory.
    let (Some(endpoint), Some(peer)) = (unsafe { (endpoint.as_ref(), peer.as_ref()) }) else {
        return invalid("no endpoint, or no peer");
    };
    let Some(peer) = peer.peer() else { return invalid("the peer's family is neither 4 nor 6") };
    result(endpoint.post(peer, out))
}

fn outgoing(shape: Shape, span: Span, data: u64, context: u64, flags: u32) -> Outgoing {
    let data = (flags & DATA != 0).then_some(data);
    Outgoing { shape, span, data, context, is_buffered: flags & BUFFERED != 0, is_quiet: flags & QUIET != 0 }
}

/// Writes into registered memory of a peer.
///
/// # Safety
/// Pointers and memory meet the requirements of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_write(
    endpoint: *mut Endpoint,
    peer: *const CPeer,
    start: *const c_void,
    len: usize,
    key: u64,
    offset: u64,
    data: u64,
    context: u64,
    flags: u32,
) -> c_int {
    let out = outgoing(Shape::Write { key, at: offset }, span(start, len), data, context, flags);
    // SAFETY: the caller guarantees valid pointers and memory.
    unsafe { post(endpoint, peer, &out) }
}

/// Reads from registered memory of a peer.
///
/// # Safety
/// Pointers and memory meet the requirements of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_read(
    endpoint: *mut Endpoint,
    peer: *const CPeer,
    start: *mut c_void,
    len: usize,
    key: u64,
    offset: u64,
    context: u64,
) -> c_int {
    let out = outgoing(Shape::Read { key, at: offset }, span(start, len), 0, context, 0);
    // SAFETY: the caller guarantees valid pointers and memory.
    unsafe { post(endpoint, peer, &out) }
}

/// Sends a message.
///
/// # Safety
/// Pointers and memory meet the requirements of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_send(
    endpoint: *mut Endpoint,
    peer: *const CPeer,
    start: *const c_void,
    len: usize,
    tag: u64,
    data: u64,
    context: u64,
    flags: u32,
) -> c_int {
    let tag = (flags & TAGGED != 0).then_some(tag);
    let out = outgoing(Shape::Message { tag }, span(start, len), data, context, flags);
    // SAFETY: the caller guarantees valid pointers and memory.
    unsafe { post(endpoint, peer, &out) }
}

/// Posts an atomic operation on values in registered memory of a peer.
///
/// # Safety
/// Pointers and memory meet the requirements of the header; `atomic` is null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_atomic(
    endpoint: *mut Endpoint,
    peer: *const CPeer,
    atomic: *const CAtomic,
    context: u64,
    flags: u32,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or readable.
    let Some(atomic) = (unsafe { atomic.as_ref() }) else { return invalid("no operation") };
    let change = u8::try_from(atomic.change).ok().and_then(Change::from_number);
    let datatype = u8::try_from(atomic.datatype).ok().and_then(Datatype::from_number);
    let (Some(change), Some(datatype)) = (change, datatype) else {
        return invalid("this operation or this type of number does not exist");
    };
    let Ok(count) = u16::try_from(atomic.count) else { return invalid("too many numbers") };
    let len = usize::from(count) * datatype.size();
    let given = |is_given: bool, start| span(start, if is_given { len } else { 0 });
    let shape = Shape::Atomic(Atomic {
        key: atomic.key,
        at: atomic.offset,
        change,
        datatype,
        count,
        compare: given(change.compares(), atomic.compare),
        found: (!atomic.found.is_null()).then(|| span(atomic.found, len)),
    });
    let operands = given(change != Change::Read, atomic.operands);
    let out = outgoing(shape, operands, 0, context, flags & QUIET);
    // SAFETY: the caller guarantees valid pointers and memory.
    unsafe { post(endpoint, peer, &out) }
}

/// Receives a message.
///
/// # Safety
/// Pointers and memory meet the requirements of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_receive(
    endpoint: *mut Endpoint,
    from: *const CPeer,
    start: *mut c_void,
    len: usize,
    tag: u64,
    ignore: u64,
    context: u64,
    flags: u32,
) -> c_int {
    // SAFETY: the caller guarantees valid pointers and memory.
    unsafe { vnet_rdma_receive_several(endpoint, from, start, len, tag, ignore, 0, context, flags) }
}

/// Posts a buffer that receives several messages.
///
/// # Safety
/// Pointers and memory meet the requirements of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_receive_several(
    endpoint: *mut Endpoint,
    from: *const CPeer,
    start: *mut c_void,
    len: usize,
    tag: u64,
    ignore: u64,
    least: u64,
    context: u64,
    flags: u32,
) -> c_int {
    // SAFETY: the caller guarantees valid pointers and memory.
    let (Some(endpoint), from) = (unsafe { (endpoint.as_ref(), from.as_ref()) }) else {
        return invalid("no endpoint");
    };
    let Some(matching) = matching(from, tag, ignore, flags) else {
        return invalid("the peer's family is neither 4 nor 6");
    };
    let several = (least > 0).then_some(least);
    result(endpoint.post_receive(&Receive { matching, span: span(start, len), context, several }))
}

/// Returns `None` if `from` is no address.
fn matching(from: Option<&CPeer>, tag: u64, ignore: u64, flags: u32) -> Option<Match> {
    let from = match from {
        Some(peer) => Some(peer.peer()?),
        None => None,
    };
    Some(Match { tag: (flags & TAGGED != 0).then_some((tag, ignore)), from })
}

/// Finds an unexpected message without receiving it.
///
/// # Safety
/// `endpoint` is null or open; `from` is null or readable; `seen` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_peek(
    endpoint: *mut Endpoint,
    from: *const CPeer,
    tag: u64,
    ignore: u64,
    flags: u32,
    claim: u64,
    seen: *mut CCompletion,
) -> c_int {
    // SAFETY: the caller guarantees valid pointers and memory.
    let (Some(endpoint), from) = (unsafe { (endpoint.as_ref(), from.as_ref()) }) else {
        return invalid("no endpoint");
    };
    if seen.is_null() {
        return invalid("no place for the message's description");
    }
    let Some(matching) = matching(from, tag, ignore, flags) else {
        return invalid("the peer's family is neither 4 nor 6");
    };
    let Some(found) = endpoint.peek(&matching, (claim != 0).then_some(claim)) else { return 0 };
    let completion = Completion {
        kind: Kind::Receive,
        status: Status::Success,
        context: 0,
        len: found.len,
        tag: found.tag,
        data: found.data,
        peer: found.from,
        offset: 0,
        is_released: false,
        is_late: false,
        buffer: None,
    };
    // SAFETY: the pointer is not null, and the caller guarantees that it is writable.
    unsafe { seen.write(completion.into()) };
    1
}

/// Receives a message that a probe reserved.
///
/// # Safety
/// Pointers and memory meet the requirements of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_receive_claimed(
    endpoint: *mut Endpoint,
    claim: u64,
    start: *mut c_void,
    len: usize,
    context: u64,
    flags: u32,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(endpoint) = (unsafe { endpoint.as_ref() }) else { return invalid("no endpoint") };
    let span = (flags & DISCARD == 0).then(|| span(start, len));
    if endpoint.receive_claimed(claim, span, context) { 0 } else { -libc::ENOENT }
}

/// Withdraws a posted buffer.
///
/// # Safety
/// `endpoint` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_cancel(endpoint: *mut Endpoint, context: u64) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(endpoint) = (unsafe { endpoint.as_ref() }) else { return invalid("no endpoint") };
    if endpoint.cancel(context) { 0 } else { -libc::ENOENT }
}

/// Returns how packets to a peer travel.
///
/// # Safety
/// `endpoint` is null or open; `peer` is null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_attachment(endpoint: *mut Endpoint, peer: *const CPeer) -> c_int {
    // SAFETY: the caller guarantees that the pointers are null or valid.
    let (Some(endpoint), Some(peer)) = (unsafe { (endpoint.as_ref(), peer.as_ref()) }) else {
        return invalid("no endpoint, or no peer");
    };
    peer.peer().map_or_else(
        || invalid("the peer's family is neither 4 nor 6"),
        |peer| endpoint.attachment(peer) as c_int,
    )
}
