//! Control: everything that changes what the core does.
//!
//! Every key of the configuration is declared once ([`settings`]). A file, or a command, is read by these declarations
//! ([`config`]) into the desired state ([`desired`]) and checked as a whole (`check`). The difference to the current state
//! ([`plan`]) is carried out by the [`engine`], all or nothing: it first opens what is new, then publishes one new setup to
//! the dispatchers, then stops what is gone. There is no other way to change anything, so a command and an edited file cannot
//! differ in what they allow. What other hosts publish through a store ([`overlay`]) joins it (`overlay_join`) and goes the same way.
//! Interfaces that cannot be opened, or lose their device, are opened as soon as they can be (`reopen`).

mod absence;
mod answers;
pub mod api;
mod apply;
mod capture;
mod check;
pub mod config;
pub mod console;
pub mod credentials;
pub mod desired;
mod edits;
pub mod engine;
pub mod events;
pub mod follow;
mod indices;
pub mod language;
mod notes;
mod observers;
mod open_close;
pub mod overlay;
mod overlay_join;
pub mod plan;
mod reopen;
pub mod settings;
pub mod station;
mod table;
mod trace;
pub mod traffic;
mod usage;
pub mod watch;

pub use table::{Place, Problem};
