//! One file for each noun of the URL.

pub mod agents;
pub mod channels;
pub mod dead;
pub mod deliveries;
pub mod files;
pub mod health;
pub mod inbound;
pub mod record;
pub mod runs;
pub mod sessions;
pub mod steers;
pub mod stuck;
pub mod tenants;
pub mod uploads;
