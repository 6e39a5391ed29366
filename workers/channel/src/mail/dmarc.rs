//! Whether the author of a mail is who `From` says, found out here: DKIM and DMARC by DNS (RFC 6376, 9989). For channels that no mail server
//! with such checks stands in front of.

use std::{sync::OnceLock, time::Duration};

use mail_auth::{
    AuthenticatedMessage, DkimResult, DmarcResult, MessageAuthenticator, SpfOutput,
    dmarc::verify::DmarcParameters,
    hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig, ResolverOpts},
};
use tokio::time::timeout;
use towpath_chassis::{Chassis, Error, Result, clock};

/// For all questions about one mail, however many signatures it carries. Shorter than a handler may take.
const ASK: Duration = Duration::from_secs(8);

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

/// Whether a signature (DKIM) of the domain of `from` stands for the mail, as its DMARC record wants it aligned; a domain without such a record is judged by a signature
/// of its very name. Who handed the mail on is not asked after (SPF): that is our own mail server or a provider, whose address may well be named in the author's record,
/// and then everybody's mail would be the author's. A signature outlives forwarding (field case C13).
pub async fn judge(resolver: &MessageAuthenticator, from: &str, raw: &[u8]) -> Verdict {
    match timeout(clock::scaled(ASK), ask(resolver, from, raw)).await {
        Ok(verdict) => verdict,
        Err(_) => Verdict::Unsure(format!("DNS did not answer within {} s", ASK.as_secs())),
    }
}

async fn ask(resolver: &MessageAuthenticator, from: &str, raw: &[u8]) -> Verdict {
    let Some(message) = AuthenticatedMessage::parse(raw) else { return Verdict::NotProven };
    // What is judged must be the author whom the channel goes by, however a crafted header may be read.
    if !matches!(message.froms(), [author] if author.eq_ignore_ascii_case(from)) {
        return Verdict::NotProven;
    }
    let Some((_, domain)) = from.rsplit_once('@') else { return Verdict::NotProven };
    let dkim = resolver.verify_dkim(&message).await;
    let spf = SpfOutput::new(domain.to_owned());
    let dmarc = resolver.verify_dmarc(DmarcParameters::new(&message, &dkim, domain, &spf)).await;
    let is_signed_by_author = dkim.iter().any(|output| {
        *output.result() == DkimResult::Pass && output.signature().is_some_and(|signature| signature.d.eq_ignore_ascii_case(domain))
    });
    let why = match dmarc.dkim_result() {
        DmarcResult::Pass => return Verdict::Author,
        // A domain that publishes no policy may sign all the same.
        DmarcResult::None if is_signed_by_author && dmarc.dmarc_record().is_none() => return Verdict::Author,
        DmarcResult::TempError(error) => Some(error.to_string()),
        _ => dkim.iter().find_map(|output| match output.result() {
            DkimResult::TempError(error) => Some(error.to_string()),
            _ => None,
        }),
    };
    why.map_or(Verdict::NotProven, |why| Verdict::Unsure(format!("DNS did not tell whether {domain} vouches for it: {why}")))
}
