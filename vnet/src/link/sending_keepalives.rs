//! Keepalives and registrations of sealed links, which the keeper sends from the bridge's socket.

use super::link::Link;
use super::native::send_probes::Courier;
use super::sealed::keeper::KeepaliveSender;

impl KeepaliveSender for Courier {
    fn keepalive(&self, link: &Link, asks_rekey: bool) {
        let (Some(native), Some(seal)) = (link.native(), link.seal()) else { return };
        let Some(via) = &native.via else {
            let body = seal.keepalive(asks_rekey, false).to_bytes();
            return self.post_keepalive((link, native), None, &body);
        };
        let (hears_directly, others) = via.other_paths(link.remote());
        let body = seal.keepalive(asks_rekey, hears_directly).to_bytes();
        for to in std::iter::once(None).chain(others.into_iter().map(Some)) {
            self.post_keepalive((link, native), to, &body);
        }
    }

    fn register(&self, link: &Link) {
        if let Some(native) = link.native()
            && let Some((relay, bytes)) = native.via.as_ref().and_then(|via| via.registration())
        {
            self.post_raw((link, native), relay, &bytes);
        }
    }
}
