#![doc = include_str!("../README.md")]

pub mod digest;
pub mod life;
mod play;
mod recover;
pub mod roles;
mod sandboxes;
mod world;

pub use life::Life;
pub use play::{Scene, Who, play};
pub use world::{Process, World};
