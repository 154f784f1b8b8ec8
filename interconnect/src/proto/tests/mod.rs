//! Engines against each other on a fake clock and a fake network.

mod cases;
mod goodput;
mod model;
mod wire;
mod world;
