//! Tests that run engines against each other with a simulated clock and a simulated network.

mod answers;
mod cases;
mod goodput;
mod hostile;
mod local;
mod model;
mod parts;
mod random;
mod shares;
mod stranger;
mod streams;
mod wire;
mod world;
mod writes;

pub(super) use random::mix;
