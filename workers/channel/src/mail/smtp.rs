//! Handing a mail in, once. Told apart by whether it can have been taken (invariant UNSURE).

use std::{net::SocketAddr, time::Duration};

use lettre::{
    address::Envelope,
    transport::smtp::{
        authentication::{Credentials, Mechanism},
        client::{AsyncSmtpConnection, TlsParameters},
        extension::ClientId,
    },
};
use tokio::{net::lookup_host, time::timeout};
use towpath_chassis::{Chassis, clock, kill};
use towpath_delivery::{address::refusal, state::Answer};
use towpath_schemas::channel::{Smtp, Tls};

use crate::circuit::Attempt;

/// Until the server is ready to take a mail.
const GREET: Duration = Duration::from_secs(10);
/// For the mail itself. With the greeting shorter than a delivery's claim.
const SEND: Duration = Duration::from_secs(30);

/// `domain` is ours.
pub async fn send(chassis: &Chassis, smtp: &Smtp, password: Option<&str>, domain: &str, envelope: &Envelope, mail: &[u8]) -> Attempt {
    let mut connection = match timeout(clock::scaled(GREET), greet(chassis, smtp, password, domain)).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(Greeting::Never(why))) => return Attempt::broken(why, true),
        Ok(Err(Greeting::NotNow(why))) => return Attempt::broken(why, false),
        Err(_) => return Attempt::broken(format!("{} did not greet within {} s", smtp.host, GREET.as_secs()), false),
    };
    kill::point("send").await;
    let answer = match timeout(clock::scaled(SEND), connection.send(envelope, mail)).await {
        Ok(Ok(response)) => Answer::Taken(words(&response.message().collect::<Vec<_>>().join(" "), response.code())),
        Ok(Err(error)) => match error.status() {
            Some(code) if error.is_permanent() => Answer::Refused(words(&error.to_string(), code)),
            Some(code) => Answer::NotTaken { why: words(&error.to_string(), code), retry_after: None },
            None => Answer::NoAnswer(cut(&error.to_string())),
        },
        Err(_) => Answer::NoAnswer("timed out".to_owned()),
    };
    kill::point("sent").await;
    connection.abort().await;
    Attempt::of(answer)
}

fn words(message: &str, code: lettre::transport::smtp::response::Code) -> String {
    format!("SMTP {code}: {}", cut(message))
}

fn cut(text: &str) -> String {
    text.chars().take(300).collect()
}

enum Greeting {
    /// It cannot work as it is configured.
    Never(String),
    NotNow(String),
}

async fn greet(chassis: &Chassis, smtp: &Smtp, password: Option<&str>, domain: &str) -> Result<AsyncSmtpConnection, Greeting> {
    let not_now = |error: lettre::transport::smtp::Error| Greeting::NotNow(cut(&format!("{}: {error}", smtp.host)));
    let address = resolve(chassis, smtp).await?;
    let hello = ClientId::Domain(domain.to_owned());
    let parameters = || TlsParameters::new(smtp.host.clone()).map_err(|error| Greeting::Never(cut(&format!("mail.smtp.host: {error}"))));
    let implicit = match smtp.tls {
        Tls::Implicit => Some(parameters()?),
        Tls::Starttls | Tls::None => None,
    };
    let mut connection =
        AsyncSmtpConnection::connect_tokio1(address, Some(clock::scaled(GREET)), &hello, implicit, None).await.map_err(not_now)?;
    if smtp.tls == Tls::Starttls {
        if !connection.can_starttls() {
            return Err(Greeting::NotNow(format!(
                "{} offers no STARTTLS; nothing is sent in clear unless mail.smtp.tls is `none`",
                smtp.host
            )));
        }
        connection.starttls(parameters()?, &hello).await.map_err(not_now)?;
    }
    if let Some(user) = &smtp.user {
        let credentials = Credentials::new(user.clone(), password.unwrap_or_default().to_owned());
        connection.auth(&[Mechanism::Plain, Mechanism::Login], &credentials).await.map_err(|error| {
            if error.is_permanent() { Greeting::Never(cut(&format!("{}: mail.smtp.user: {error}", smtp.host))) } else { not_now(error) }
        })?;
    }
    Ok(connection)
}

/// The first address of the host that the operator allows to be connected to.
async fn resolve(chassis: &Chassis, smtp: &Smtp) -> Result<SocketAddr, Greeting> {
    let found = lookup_host((smtp.host.as_str(), smtp.port)).await.map_err(|error| Greeting::NotNow(format!("{}: {error}", smtp.host)))?;
    let mut why = Greeting::NotNow(format!("{} has no address", smtp.host));
    for address in found {
        match refusal(address.ip(), &chassis.config.webhook_allow) {
            None => return Ok(address),
            Some(kind) => {
                why = Greeting::Never(format!("{} is {kind}; the operator can allow its network by TOWPATH_WEBHOOK_ALLOW", address.ip()))
            }
        }
    }
    Err(why)
}
