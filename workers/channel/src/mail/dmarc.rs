//! Whether the author of a mail is who `From` says, found out here: DKIM, SPF and DMARC by DNS (RFC 6376, 7208, 9989). For channels that no mail server
//! with such checks stands in front of.

use std::sync::OnceLock;

use mail_auth::{
    AuthenticatedMessage, DkimResult, DmarcResult, MessageAuthenticator, SpfOutput, SpfResult,
    dmarc::verify::DmarcParameters,
    hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig, ResolverOpts},
    spf::verify::SpfParameters,
};
use towpath_chassis::{Chassis, Error, Result};

use crate::intake::table::Envelope;

/// What was found out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Author,
    /// Nobody vouches for the author.
    NotProven,
    /// It cannot be found out now (invariant UNSURE).
    Unsure(String),
}

/// The resolver of this process: `TOWPATH_DNS`, else the system's.
pub fn resolver(chassis: &Chassis) -> Result<&'static MessageAuthenticator> {
    static RESOLVER: OnceLock<MessageAuthenticator> = OnceLock::new();
    if let Some(resolver) = RESOLVER.get() {
        return Ok(resolver);
    }
    let made = match chassis.config.dns {
        None => MessageAuthenticator::new_system_conf(),
        Some(server) => {
            let mut connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()];
            for connection in &mut connections {
                connection.port = server.port();
            }
            let servers = vec![NameServerConfig::new(server.ip(), true, connections.into())];
            MessageAuthenticator::new(ResolverConfig::from_parts(None, Vec::new(), servers), ResolverOpts::default())
        }
    };
    let made = made.map_err(|error| Error::broken(format!("DNS resolver: {error}")))?;
    Ok(RESOLVER.get_or_init(|| made))
}

/// Whether DMARC passes: a signature or the sending server's address, of the author's own domain. A domain without a DMARC record is judged by a signature alone.
/// An address that forwarded the mail fails SPF always; a signature outlives that (field case C13).
pub async fn judge(resolver: &MessageAuthenticator, envelope: &Envelope, raw: &[u8]) -> Verdict {
    let Some(message) = AuthenticatedMessage::parse(raw) else { return Verdict::NotProven };
    let [from] = message.froms() else { return Verdict::NotProven };
    let Some((_, author)) = from.rsplit_once('@') else { return Verdict::NotProven };
    let author = author.to_lowercase();
    let dkim = resolver.verify_dkim(&message).await;
    let mail_from = envelope.from.rsplit_once('@').map_or(author.as_str(), |(_, domain)| domain).to_lowercase();
    let spf = match envelope.ip {
        Some(ip) => {
            let helo = envelope.helo.as_deref().unwrap_or(&mail_from);
            resolver.verify_spf(SpfParameters::verify_mail_from(ip, helo, "towpath", &envelope.from)).await
        }
        None => SpfOutput::new(mail_from.clone()),
    };
    let dmarc = resolver.verify_dmarc(DmarcParameters::new(&message, &dkim, &mail_from, &spf)).await;
    let is_signed_by_author = dkim.iter().any(|output| {
        *output.result() == DkimResult::Pass && output.signature().is_some_and(|signature| signature.d.eq_ignore_ascii_case(&author))
    });
    match (dmarc.dkim_result(), dmarc.spf_result()) {
        (DmarcResult::Pass, _) | (_, DmarcResult::Pass) => return Verdict::Author,
        // A domain that publishes no policy may sign all the same.
        (DmarcResult::None, DmarcResult::None) if is_signed_by_author && dmarc.dmarc_record().is_none() => return Verdict::Author,
        _ => {}
    }
    let unsure = [dmarc.dkim_result(), dmarc.spf_result()].into_iter().find_map(|result| match result {
        DmarcResult::TempError(error) => Some(error.to_string()),
        _ => None,
    });
    let dkim_unsure = dkim.iter().find_map(|output| match output.result() {
        DkimResult::TempError(error) => Some(error.to_string()),
        _ => None,
    });
    let spf_unsure = (spf.result() == SpfResult::TempError).then(|| "SPF: no answer".to_owned());
    match unsure.or(dkim_unsure).or(spf_unsure) {
        Some(why) => Verdict::Unsure(format!("DNS did not tell whether {author} vouches for it: {why}")),
        None => Verdict::NotProven,
    }
}
