//! Keepalives and registrations of sealed links: the keeper's datagrams, from the bridge's socket.

use super::Link;
use super::sealed::keeper::KeepaliveSender;
use super::socket::control_datagrams::Courier;

impl KeepaliveSender for Courier {
    fn keepalive(&self, link: &Link, asks_rekey: bool) {
        let Some(seal) = link.seal() else { return };
        let Some(via) = link.via() else {
            return self.post_keepalive(link, None, &seal.keepalive(asks_rekey, false).to_bytes());
        };
        let (hears_directly, others) = via.other_paths(link.remote());
        let body = seal.keepalive(asks_rekey, hears_directly).to_bytes();
        for to in std::iter::once(None).chain(others.into_iter().map(Some)) {
            self.post_keepalive(link, to, &body);
        }
    }

    fn register(&self, link: &Link) {
        if let Some((relay, bytes)) = link.via().and_then(|via| via.registration()) {
            self.post_raw(link, relay, &bytes);
        }
    }
}
