//! Real sandboxes on this host against a small gateway that speaks the other end of the protocol.
//! They need root (or unprivileged user namespaces), bubblewrap and python3, as `./dev test` installs them.

mod ends;
mod fence;
mod gateway;
mod inputs;
mod lives;
mod output;
mod steering;
mod terminal;
mod walls;
mod world;
