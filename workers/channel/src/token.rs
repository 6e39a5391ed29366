//! The address that an answer to us is asked to go to: `local+<thread><mark>@domain`. It brings a reply into its thread when the reader's program
//! keeps neither `In-Reply-To` nor `References` (field case C17). Nobody else can make one.

use towpath_chassis::secret::Secrets;
use towpath_schemas::id::ThreadId;

/// Bytes of a local part (RFC 5321, 4.5.3.1.1).
const LOCAL_BYTES: usize = 64;
const THREAD_DIGITS: usize = 32;

fn what(thread: ThreadId) -> String {
    format!("reply {thread}")
}

/// `address` itself when there is no room for a token.
pub fn address(secrets: &Secrets, address: &str, thread: ThreadId) -> String {
    let Some((local, domain)) = address.rsplit_once('@') else { return address.to_owned() };
    let local = format!("{local}+{}{}", thread.uuid().as_simple(), secrets.mark(&what(thread)));
    if local.len() > LOCAL_BYTES { address.to_owned() } else { format!("{local}@{domain}") }
}

/// The address without what stands behind its `+`, and the thread that this proves.
pub fn split(secrets: &Secrets, address: &str) -> (String, Option<ThreadId>) {
    let address = address.trim().to_lowercase();
    let Some((local, domain)) = address.rsplit_once('@') else { return (address, None) };
    let Some((bare, token)) = local.split_once('+') else { return (address, None) };
    let thread = token
        .split_at_checked(THREAD_DIGITS)
        .and_then(|(thread, mark)| Some((format!("{}_{thread}", ThreadId::PREFIX).parse::<ThreadId>().ok()?, mark)))
        .filter(|(thread, mark)| secrets.is_mark(&what(*thread), mark))
        .map(|(thread, _)| thread);
    (format!("{bare}@{domain}"), thread)
}

#[cfg(test)]
mod tests {
    use towpath_chassis::config::Hidden;

    use super::*;

    #[test]
    fn a_token_leads_to_its_thread_and_a_made_up_one_nowhere_c17() {
        let secrets = Secrets::new(&[Hidden("ab".repeat(32))]).expect("secrets");
        let (thread, other) = (ThreadId::mint(), ThreadId::mint());
        let reply_to = address(&secrets, "agent@example.org", thread);
        assert_eq!(split(&secrets, &reply_to.to_uppercase()), ("agent@example.org".to_owned(), Some(thread)));
        let moved = reply_to.replace(&thread.uuid().as_simple().to_string(), &other.uuid().as_simple().to_string());
        assert_eq!(split(&secrets, &moved), ("agent@example.org".to_owned(), None));
        assert_eq!(split(&secrets, "agent+sales@example.org"), ("agent@example.org".to_owned(), None));
        assert_eq!(split(&secrets, "agent@example.org"), ("agent@example.org".to_owned(), None));
        let long = "a-rather-long-local-part@example.org";
        assert_eq!(address(&secrets, long, thread), long);
    }
}
