//! What a [`Link`] lets others do with its stream. On links of other encapsulations nothing happens.

use std::sync::Arc;

use crate::link::Link;
use crate::link::sealed::identity::IdentityStore;

impl Link {
    /// True for a stream link.
    pub fn is_stream(&self) -> bool {
        self.stream().is_some()
    }

    /// Uses `identity` for TLS, where the stream is sealed. The first call counts.
    pub fn set_identity(&self, identity: Arc<IdentityStore>) {
        if let Some(stream) = self.stream() {
            stream.set_identity(identity);
        }
    }

    /// Closes a stream link's connections for good.
    pub fn stop(&self) {
        if let Some(stream) = self.stream() {
            stream.stop();
        }
    }

    /// Name in the other host's certificate, where the link is a sealed stream.
    pub fn stream_peer(&self) -> Option<&str> {
        self.stream()?.peer.as_deref()
    }

    /// Seconds since a stream link heard its peer; `None` when it never did.
    pub fn stream_heard_s(&self) -> Option<u64> {
        self.stream()?.heard_s()
    }
}
