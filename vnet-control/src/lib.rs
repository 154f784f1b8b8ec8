//! Control: everything that changes what the core does.
//!
//! Every key of the configuration is declared once ([`settings`]). These declarations parse a file or command ([`config`]) into
//! the desired state ([`desired`]), which is checked as a whole (`check`). The [`engine`] applies the difference to the current
//! state ([`plan`]), all or nothing: it first opens new objects, then publishes one new setup to the dispatchers, then stops
//! removed objects. There is no other way to change anything, so a command and an edited file cannot differ in what they allow.
//! Links and stations computed from the records of other hosts in a store ([`overlay`]) are merged into the desired state
//! (`overlay_join`) and applied in the same way. Interfaces that cannot be opened, or lose their device, are retried (`reopen`).
//! [`take_over`]: a new vnetd takes the place of a running one under traffic.

mod absence;
mod answers;
pub mod api;
mod apply;
mod attach;
mod capture;
mod check;
pub mod config;
pub mod console;
pub mod credentials;
pub mod desired;
mod direct;
mod edits;
pub mod engine;
pub mod events;
pub mod follow;
mod indices;
mod inherited;
pub mod kept;
pub mod language;
mod notes;
mod observers;
mod open_close;
pub mod overlay;
mod overlay_join;
pub mod plan;
mod reopen;
pub mod sealing;
pub mod settings;
pub mod station;
mod table;
pub mod take_over;
mod timeline;
mod trace;
pub mod traffic;
mod usage;
pub mod watch;

pub use table::{Place, Problem};
