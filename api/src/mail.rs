//! The mail listener: LMTP (RFC 2033) and SMTP (RFC 5321) for the mail server in front, on an address that only that server can reach. A mail is answered with 250
//! only when it is kept (invariant KEPT); what cannot be kept now is answered with 451, and the server brings it again.

use std::{sync::Arc, time::Duration};

use smtp_proto::{Request, request::receiver::DataReceiver};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};
use towpath_channel::{Envelope, Inbox};
use towpath_chassis::{Chassis, Error};
use towpath_schemas::{ErrorCode, id::ChannelId, limit::INBOUND_BYTES};

/// Connections at a time; each may hold a whole mail.
const CONNECTIONS: usize = 40;
/// Silence after which a connection is closed (RFC 5321, 4.5.3.2: at least five minutes).
const SILENCE: Duration = Duration::from_secs(300);
/// Bytes of a command line.
const LINE_BYTES: u64 = 4096;
/// Recipients of one mail (RFC 5321, 4.5.3.1.8: at least 100).
const RECIPIENTS: usize = 100;
/// Commands that make no sense, after which a connection is closed.
const MISTAKES: usize = 20;
/// Bytes of a mail that is too large which are read before the connection is closed.
const DRAIN_BYTES: usize = 4 * INBOUND_BYTES;

/// Serves until the process drains.
pub async fn serve(chassis: Chassis, inbox: Inbox, listener: TcpListener) {
    let stop = chassis.tasks.stopping();
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Too many open files, as a rule: it passes.
                tracing::warn!(%error, "a mail connection cannot be accepted");
                chassis.tasks.sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let place = places.clone().try_acquire_owned();
        let (own, inbox) = (chassis.clone(), inbox.clone());
        chassis.tasks.spawn(async move {
            let mut connection = Connection { stream: BufReader::new(stream), chassis: own, inbox, lmtp: false, mistakes: 0 };
            let result = match place {
                Ok(_place) => connection.talk().await,
                Err(_) => {
                    metrics::counter!("towpath_limit_reached_total", "limit" => "mail connections").increment(1);
                    connection.say("421 4.3.2 too many connections, come again").await
                }
            };
            if let Err(error) = result {
                tracing::debug!(%error, "a mail connection ended");
            }
        });
    }
}

struct Connection {
    stream: BufReader<TcpStream>,
    chassis: Chassis,
    inbox: Inbox,
    lmtp: bool,
    mistakes: usize,
}

/// A mail that is being handed over.
#[derive(Default)]
struct Transaction {
    from: Option<String>,
    /// Each with the channel that takes its mail.
    to: Vec<(String, ChannelId)>,
}

impl Connection {
    async fn say(&mut self, line: &str) -> std::io::Result<()> {
        self.stream.get_mut().write_all(format!("{line}\r\n").as_bytes()).await
    }

    /// None when the other side is gone, silent, or says lines without end.
    async fn line(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        let mut limited = (&mut self.stream).take(LINE_BYTES);
        match timeout(SILENCE, limited.read_until(b'\n', &mut line)).await {
            Ok(read) => {
                read?;
                Ok(line.ends_with(b"\n").then_some(line))
            }
            Err(_) => {
                self.say("421 4.4.2 nothing was said for five minutes").await?;
                Ok(None)
            }
        }
    }

    async fn talk(&mut self) -> std::io::Result<()> {
        self.say("220 towpath takes mail").await?;
        let mut transaction = Transaction::default();
        let stop = self.chassis.tasks.stopping();
        loop {
            let line = tokio::select! {
                () = stop.cancelled() => return self.say("421 4.3.2 this process is shutting down, come again").await,
                line = self.line() => line?,
            };
            let Some(line) = line else { return Ok(()) };
            let request = Request::parse(&mut line.iter());
            match request {
                Ok(Request::Ehlo { .. }) => self.greet(false, &mut transaction).await?,
                Ok(Request::Lhlo { .. }) => self.greet(true, &mut transaction).await?,
                Ok(Request::Helo { .. }) => {
                    transaction = Transaction::default();
                    self.say("250 towpath").await?;
                }
                Ok(Request::Mail { from }) if from.size > INBOUND_BYTES => {
                    transaction = Transaction::default();
                    self.say(&format!("552 5.3.4 a message may hold at most {INBOUND_BYTES} bytes")).await?;
                }
                Ok(Request::Mail { from }) => {
                    transaction = Transaction { from: Some(from.address.into_owned()), to: Vec::new() };
                    self.say("250 2.1.0 ok").await?;
                }
                Ok(Request::Rcpt { to }) => self.recipient(&to.address, &mut transaction).await?,
                Ok(Request::Data) if transaction.to.is_empty() => self.mistake("503 5.5.1 MAIL and RCPT come before DATA").await?,
                Ok(Request::Data) => {
                    if !self.take(std::mem::take(&mut transaction)).await? {
                        return Ok(());
                    }
                }
                Ok(Request::Rset) => {
                    transaction = Transaction::default();
                    self.say("250 2.0.0 ok").await?;
                }
                Ok(Request::Noop { .. }) => self.say("250 2.0.0 ok").await?,
                Ok(Request::Vrfy { .. }) => self.say("252 2.5.0 send and see").await?,
                Ok(Request::Quit) => return self.say("221 2.0.0 good bye").await,
                Ok(other) => self.mistake(&format!("502 5.5.1 {} is not spoken here", other.name())).await?,
                Err(_) => self.mistake("500 5.5.2 this is no command that is understood").await?,
            }
            if self.mistakes > MISTAKES {
                return self.say("421 4.7.0 too many mistakes").await;
            }
        }
    }

    async fn mistake(&mut self, line: &str) -> std::io::Result<()> {
        self.mistakes += 1;
        self.say(line).await
    }

    async fn greet(&mut self, lmtp: bool, transaction: &mut Transaction) -> std::io::Result<()> {
        *transaction = Transaction::default();
        self.lmtp = lmtp;
        self.say(&format!(
            "250-towpath\r\n250-SIZE {INBOUND_BYTES}\r\n250-8BITMIME\r\n250-SMTPUTF8\r\n250-PIPELINING\r\n250 ENHANCEDSTATUSCODES"
        ))
        .await
    }

    async fn recipient(&mut self, address: &str, transaction: &mut Transaction) -> std::io::Result<()> {
        if transaction.from.is_none() {
            return self.mistake("503 5.5.1 MAIL comes before RCPT").await;
        }
        if transaction.to.len() == RECIPIENTS {
            return self.say(&format!("452 4.5.3 at most {RECIPIENTS} recipients at a time")).await;
        }
        match self.inbox.recipients(&[address.to_owned()]).await {
            Ok(found) => match found.first() {
                Some((channel, _)) => {
                    transaction.to.push((address.to_owned(), *channel));
                    self.say("250 2.1.5 ok").await
                }
                None => self.mistake(&format!("550 5.1.1 no channel takes mail for <{}>", printable(address))).await,
            },
            Err(error) => self.later(&error).await,
        }
    }

    async fn later(&mut self, error: &Error) -> std::io::Result<()> {
        tracing::warn!(error = error.chain(), "a mail cannot be taken now");
        self.say("451 4.3.0 it cannot be kept now, bring it again").await
    }

    /// The content of a mail; false when the connection is over.
    async fn take(&mut self, transaction: Transaction) -> std::io::Result<bool> {
        self.say("354 go on").await?;
        let Some(raw) = self.content().await? else { return Ok(false) };
        let mut channels: Vec<ChannelId> = Vec::new();
        for (_, channel) in &transaction.to {
            if !channels.contains(channel) {
                channels.push(*channel);
            }
        }
        let mut answers = Vec::with_capacity(channels.len());
        for channel in channels {
            let to = transaction.to.iter().filter(|(_, of)| *of == channel).map(|(address, _)| address.clone()).collect();
            let envelope = Envelope { from: transaction.from.clone().unwrap_or_default(), to };
            let answer = match &raw {
                Ok(raw) => match self.inbox.mail(channel, envelope, raw.clone()).await {
                    Ok(_) => "250 2.6.0 kept".to_owned(),
                    Err(Error::Refused(problem)) if problem.code == ErrorCode::TooLarge.code() => format!("552 5.3.4 {}", problem.detail),
                    Err(Error::Refused(problem)) if problem.code == ErrorCode::NotFound.code() => format!("550 5.1.1 {}", problem.detail),
                    Err(error) => {
                        tracing::warn!(error = error.chain(), "a mail cannot be kept now");
                        "451 4.3.0 it cannot be kept now, bring it again".to_owned()
                    }
                },
                Err(too_large) => too_large.clone(),
            };
            answers.push((channel, answer));
        }
        // LMTP has an answer for each recipient; SMTP one for all, the worst: a mail that is brought again is known again.
        if self.lmtp {
            for (_, channel) in &transaction.to {
                let answer = answers.iter().find(|(of, _)| of == channel).map_or("451 4.3.0 bring it again", |(_, answer)| answer.as_str());
                self.stream.get_mut().write_all(format!("{answer}\r\n").as_bytes()).await?;
            }
        } else {
            let worst = answers
                .iter()
                .map(|(_, answer)| answer)
                .max_by_key(|answer| ["2", "5", "4"].iter().position(|class| answer.starts_with(class)))
                .cloned();
            self.say(&worst.unwrap_or_else(|| "451 4.3.0 bring it again".to_owned())).await?;
        }
        Ok(true)
    }

    /// Up to the lone dot. None when the other side went away before it: then nothing was handed over.
    async fn content(&mut self) -> std::io::Result<Option<Result<Vec<u8>, String>>> {
        let mut receiver = DataReceiver::new();
        let (mut raw, mut dropped) = (Vec::new(), 0_usize);
        loop {
            let Ok(piece) = timeout(SILENCE, self.stream.fill_buf()).await else {
                self.say("421 4.4.2 nothing was said for five minutes").await?;
                return Ok(None);
            };
            let piece = piece?;
            if piece.is_empty() {
                return Ok(None);
            }
            let mut bytes = piece.iter();
            let done = receiver.ingest(&mut bytes, &mut raw);
            let used = piece.len() - bytes.len();
            self.stream.consume(used);
            if raw.len() > INBOUND_BYTES || dropped > 0 {
                dropped += raw.len();
                raw.clear();
                if dropped > DRAIN_BYTES {
                    return Ok(None);
                }
            }
            if done {
                let too_large = || format!("552 5.3.4 a message may hold at most {INBOUND_BYTES} bytes");
                return Ok(Some(if dropped > 0 { Err(too_large()) } else { Ok(raw) }));
            }
        }
    }
}

fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(254).collect()
}
