//! Access to a [`Link`]'s stream for other rooms. These methods have no effect on links of other encapsulations.

use std::sync::Arc;

use crate::link::Link;
use crate::link::sealed::identity::IdentityStore;

impl Link {
    /// True for a stream link.
    pub fn is_stream(&self) -> bool {
        self.stream().is_some()
    }

    /// Uses `identity` for TLS if the stream is sealed. Only the first call has an effect.
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

    /// Host name in the other host's certificate if the link is a sealed stream.
    pub fn stream_peer(&self) -> Option<&str> {
        self.stream()?.peer.as_deref()
    }

    /// Seconds since a stream link heard its peer; `None` if it never did.
    pub fn stream_heard_s(&self) -> Option<u64> {
        self.stream()?.heard_s()
    }
}
