//! Nobody told us: each host looks at all of its own sandboxes.

use std::time::Duration;

use towpath_chassis::sweep::Sweep;

use crate::worker::Host;

/// How often a host looks.
const LOOK: Duration = Duration::from_secs(3);

impl Host {
    /// Runs on the host itself, not in the clock: no other host can judge its sandboxes.
    pub fn sweeps(&self) -> Vec<Sweep> {
        let host = self.clone();
        vec![Sweep::new("sandboxes of this host", LOOK, move |chassis| {
            let host = host.clone();
            async move { host.attend(&chassis, None).await }
        })]
    }
}
