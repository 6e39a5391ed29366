//! Mail, end to end: a real mail server (Postfix) between people and Towpath, in both directions.

use anyhow::{Context, Result, ensure};
use mail_auth::{
    common::{crypto::Ed25519Key, headers::HeaderWriter},
    dkim::DkimSigner,
};
use mail_parser::{MessageParser, MimeHeaders};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stage::{
    dns::{Dns, Mood},
    mail::{AGENTS, AUTHSERV_ID, NOWHERE, PEOPLE, Postfix},
    wait_for,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};
use towpath_journeys::{Ground, Receiver, SOON, World};

/// Answers with what it was told, keeps a count in its workspace, leaves a file, and waits for a word when it is asked to.
const AGENT: &str = r##"
import os, pathlib, sys
task = os.environ["TOWPATH_TASK"]
count = pathlib.Path("/workspace/count")
n = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(n))
heard = []
if "wait for" in task:
    print("ready", flush=True)
    with open(os.environ["TOWPATH_STEER_FIFO"]) as fifo:
        for line in fifo:
            heard.append(line.strip())
            if "go on" in line:
                break
files = sorted(os.listdir("/workspace/files")) if os.path.isdir("/workspace/files") else []
pathlib.Path("/workspace/outputs/report.txt").write_text("run %d\n" % n)
pathlib.Path(os.environ["TOWPATH_RESULT_FILE"]).write_text("**run %d** of this thread; files %s; heard %s; %s" % (n, files, heard, task.replace("\n", " | ")))
"##;

struct Town {
    world: World,
    postfix: Postfix,
    dns: Dns,
    lmtp: u16,
}

impl Town {
    async fn build() -> Result<Self> {
        let lmtp = stage::free_port()?;
        let postfix = Postfix::start(lmtp, &[PEOPLE]).await?;
        let listen = format!("127.0.0.1:{lmtp}");
        let dns = Dns::start().await?;
        let names = dns.address.to_string();
        let world = World::prepare(Ground::shared().await?, &[("TOWPATH_MAIL_LISTEN", &listen), ("TOWPATH_DNS", &names)]).await?;
        world.spawn("all", &["dev"])?;
        world.ready().await?;
        world.agent("helper", &["/usr/bin/python3", "-c", AGENT], json!({})).await?;
        let town = Self { world, postfix, dns, lmtp };
        town.channel(json!({})).await?;
        Ok(town)
    }

    async fn channel(&self, more: Value) -> Result<Value> {
        let mut definition = json!({
            "name": "mail", "agent": "helper", "access": "internal", "members": [PEOPLE], "users": { format!("ann@{PEOPLE}"): "ann" },
            "mail": { "addresses": [format!("helper@{AGENTS}")], "authserv_id": AUTHSERV_ID, "smtp": { "host": "127.0.0.1", "port": self.postfix.port, "tls": "none" } },
            "secrets": { "hook_password": "open sesame" },
        });
        if let (Some(definition), Some(more)) = (definition.as_object_mut(), more.as_object()) {
            definition.extend(more.clone());
        }
        let (status, channel) = self.world.call(Method::PUT, "/v1/channels/mail", Some(&definition)).await?;
        ensure!(status.is_success(), "{status} {channel}");
        Ok(channel)
    }

    /// Hands a mail to the mail server, as a mail program does.
    async fn send(&self, from: &str, to: &str, content: &str) -> Result<()> {
        let answers = smtp(self.postfix.port, "EHLO", from, to, content).await?;
        ensure!(answers.last().is_some_and(|answer| answer.starts_with("250")), "{answers:?}");
        Ok(())
    }

    async fn letter(&self, id: &str, headers: &str, text: &str) -> Result<()> {
        let content = format!("From: Ann <ann@{PEOPLE}>\r\nTo: helper@{AGENTS}\r\nMessage-ID: <{id}>\r\n{headers}\r\n{text}\r\n");
        self.send(&format!("ann@{PEOPLE}"), &format!("helper@{AGENTS}"), &content).await
    }

    /// What became of the newest message with this Message-ID, once something has.
    async fn inbound(&self, id: &str) -> Result<Value> {
        let found = wait_for("the message to be taken in", SOON, async || {
            let row: Option<(uuid::Uuid,)> = sqlx::query_as("select id from inbound where message_key = $1 and next_attempt_at is null")
                .bind(id)
                .fetch_optional(&self.world.db)
                .await
                .ok()?;
            Some(format!("inb_{}", row?.0.as_simple()))
        })
        .await
        .with_context(|| self.postfix.log())?;
        let page = self.world.get("/v1/inbound").await?;
        let items = page["items"].as_array().context("items")?;
        items.iter().find(|item| item["id"] == found.as_str()).cloned().context("listed")
    }

    /// Waits until Ann has that many mails; the newest.
    async fn answers(&self, count: usize) -> Result<Vec<u8>> {
        wait_for("the answer", SOON, async || self.postfix.mailbox().ok().filter(|mails| mails.len() >= count))
            .await
            .with_context(|| format!("{}\n{}", self.postfix.log(), self.world.logs()))?
            .into_iter()
            .next_back()
            .context("a mail")
    }
}

/// Speaks SMTP or LMTP; the answers after the content.
async fn smtp(port: u16, hello: &str, from: &str, to: &str, content: &str) -> Result<Vec<String>> {
    let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
    let mut answers = vec![answer(&mut stream).await?];
    let stuffed = content.replace("\r\n.", "\r\n..");
    for line in [format!("{hello} tester.test"), format!("MAIL FROM:<{from}>"), format!("RCPT TO:<{to}>"), "DATA".to_owned()] {
        stream.get_mut().write_all(format!("{line}\r\n").as_bytes()).await?;
        answers.push(answer(&mut stream).await?);
        if !answers.last().is_some_and(|answer| answer.starts_with(['2', '3'])) {
            return Ok(answers);
        }
    }
    stream.get_mut().write_all(format!("{stuffed}\r\n.\r\n").as_bytes()).await?;
    answers.push(answer(&mut stream).await?);
    Ok(answers)
}

async fn answer(stream: &mut BufReader<TcpStream>) -> Result<String> {
    loop {
        let mut line = String::new();
        ensure!(stream.read_line(&mut line).await? > 0, "the server hung up");
        if line.as_bytes().get(3) != Some(&b'-') {
            return Ok(line.trim_end().to_owned());
        }
    }
}

fn text_of(raw: &[u8]) -> Result<String> {
    Ok(MessageParser::default().parse(raw).context("a mail")?.body_text(0).context("a text")?.into_owned())
}

#[tokio::test]
async fn a_mail_is_answered_in_its_thread_steered_by_a_reply_and_followed_by_the_next_run_in_the_same_workspace() -> Result<()> {
    let town = Town::build().await?;
    // First contact, with an attachment.
    let attached = "Subject: A question\r\nMIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=b\r\n";
    let body = "--b\r\nContent-Type: text/plain; charset=utf-8\r\n\r\nPlease look.\r\n--b\r\nContent-Type: text/csv\r\n\
                Content-Disposition: attachment; filename=\"../numbers.csv\"\r\n\r\n1,2\r\n--b--";
    town.letter("one@people.test", attached, body).await?;
    let first = town.answers(1).await?;
    let mail = MessageParser::default().parse(&first).context("a mail")?;
    ensure!(mail.subject() == Some("Re: A question"), "{:?}", mail.subject());
    ensure!(mail.in_reply_to().as_text() == Some("one@people.test"), "{:?}", mail.in_reply_to());
    let text = text_of(&first)?;
    ensure!(
        text.starts_with("**run 1** of this thread; files ['numbers.csv'];") && text.contains("Subject: A question |  | Please look."),
        "{text}"
    );
    ensure!(mail.body_html(0).is_some_and(|html| html.contains("<strong>run 1</strong>")), "no HTML");
    let report = mail.attachments().next().context("an attachment")?;
    ensure!((report.attachment_name(), report.contents()) == (Some("report.txt"), b"run 1\n".as_slice()), "{report:?}");
    ensure!(mail.header_raw("Auto-Submitted").is_some_and(|value| value.trim() == "auto-replied"), "not marked as automatic");
    let started = town.inbound("one@people.test").await?;
    ensure!(started["state"] == "started" && started["author"] == format!("ann@{PEOPLE}"), "{started}");

    // A reply after the end: the next run of the same session, in the same workspace. Its subject has changed, its References have not (C15).
    let ours = mail.message_id().context("an id")?.to_owned();
    town.letter("two@people.test", &format!("Subject: something else\r\nReferences: <one@people.test> <{ours}>\r\n"), "wait for my word")
        .await?;
    let second = town.inbound("two@people.test").await?;
    ensure!(second["state"] == "started" && second["thread"] == started["thread"], "{second}");
    let run = second["run"].as_str().context("run")?.to_owned();
    town.world.until(&run, SOON, |run| run["state"] == "running").await?;

    // A reply while it runs steers it, found by nothing but the address that we asked for (C17).
    let reply_to = mail.reply_to().and_then(|to| to.first()).and_then(|to| to.address()).context("reply-to")?.to_owned();
    let content = format!("From: ann@{PEOPLE}\r\nSubject: x\r\nMessage-ID: <three@people.test>\r\n\r\ngo on, please\r\n");
    town.send(&format!("ann@{PEOPLE}"), &reply_to, &content).await?;
    let steered = town.inbound("three@people.test").await?;
    ensure!(steered["state"] == "steered" && steered["run"] == run.as_str(), "{steered}");
    let text = text_of(&town.answers(2).await?)?;
    ensure!(text.starts_with("**run 2** of this thread; files ['numbers.csv']; heard ['go on, please'];"), "{text}");
    let runs = (
        town.world.get(&format!("/v1/runs/{}", started["run"].as_str().context("run")?)).await?,
        town.world.get(&format!("/v1/runs/{run}")).await?,
    );
    ensure!(runs.0["session"] == runs.1["session"] && runs.0["principal"] == runs.1["principal"], "{runs:?}");

    // The same mail once more (the server did not hear our 250) changes nothing.
    town.letter("one@people.test", attached, body).await?;
    town.letter("four@people.test", "Subject: new\r\n", "another thread").await?;
    let text = text_of(&town.answers(3).await?)?;
    ensure!(text.starts_with("**run 1** of this thread; files [];"), "{text}");
    ensure!(town.world.count("select count(*) from run").await? == 3, "a run was doubled");
    town.world.finish().await
}

#[tokio::test]
async fn forged_automatic_looping_and_bombed_mails_start_nothing_and_say_why() -> Result<()> {
    let town = Town::build().await?;
    let helper = format!("helper@{AGENTS}");
    let refused = async |id: &str, from: &str, headers: &str, state: &str, why: &str| -> Result<()> {
        let content = format!("From: {from}\r\nMessage-ID: <{id}>\r\n{headers}\r\nhello\r\n");
        town.send(from, &helper, &content).await?;
        let inbound = town.inbound(id).await?;
        ensure!(inbound["state"] == state && inbound["reason"].as_str().is_some_and(|reason| reason.contains(why)), "{id}: {inbound}");
        Ok(())
    };
    // A domain that nobody vouches for, however it dresses up (C10, C12, C14).
    refused("f1@x", "boss@elsewhere.test", "", "refused", "nobody vouches").await?;
    refused(
        "f2@x",
        "boss@elsewhere.test",
        &format!("Authentication-Results: {AUTHSERV_ID}; dmarc=pass header.from=elsewhere.test\r\n"),
        "refused",
        "nobody vouches",
    )
    .await?;
    refused("f3@x", "boss@elsewhere.test", &format!("From: ann@{PEOPLE}\r\n"), "refused", "no author").await?;
    // The envelope is of a domain that passes, the author is not.
    let content = "From: boss@corp.test\r\nMessage-ID: <f4@x>\r\n\r\nhello\r\n";
    town.send(&format!("ann@{PEOPLE}"), &helper, content).await?;
    ensure!(town.inbound("f4@x").await?["state"] == "refused", "an author whom DMARC did not pass for was let in");
    // Automatic mail (C5, C6, C7).
    refused("a1@x", &format!("ann@{PEOPLE}"), "Auto-Submitted: auto-replied\r\n", "ignored", "Auto-Submitted").await?;
    refused("a2@x", &format!("ann@{PEOPLE}"), "List-Id: <l.people.test>\r\n", "ignored", "List-Id").await?;
    refused("a3@x", &format!("ann@{PEOPLE}"), "X-Towpath-Loop: 1\r\n", "ignored", "X-Towpath-Loop").await?;
    refused("a4@x", &helper, "", "ignored", "address of this channel").await?;
    // A bomb of parts.
    let bomb = "--b\r\nContent-Type: a/b\r\n\r\n".repeat(2000);
    let content = format!("From: ann@{PEOPLE}\r\nMessage-ID: <b1@x>\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n{bomb}");
    town.send(&format!("ann@{PEOPLE}"), &helper, &content).await?;
    let bombed = town.inbound("b1@x").await?;
    ensure!(bombed["state"] == "refused" && bombed["reason"].as_str().is_some_and(|reason| reason.contains("parts")), "{bombed}");
    // A charset that nobody knows does not stop the good mail behind it (C1); the first is read as well as it goes.
    town.letter("c1@people.test", "Subject: odd\r\nContent-Type: text/plain; charset=x-nope\r\n", "caf\u{e9}").await?;
    town.letter("c2@people.test", "Subject: good\r\n", "hello").await?;
    for id in ["c1@people.test", "c2@people.test"] {
        ensure!(town.inbound(id).await?["state"] == "started", "{id} was not taken in");
    }
    // Two programs that answer each other are stopped by the thread's hourly limit (A8).
    town.channel(json!({ "messages_per_hour": 2 })).await?;
    town.letter("l1@people.test", "Subject: loop\r\n", "1").await?;
    let mut states = Vec::new();
    for n in 2..=4 {
        town.inbound(&format!("l{}@people.test", n - 1)).await?;
        town.letter(&format!("l{n}@people.test"), "In-Reply-To: <l1@people.test>\r\n", "again").await?;
        states.push(town.inbound(&format!("l{n}@people.test")).await?);
    }
    ensure!(states[1]["state"] == "refused" && states[2]["state"] == "refused", "{states:?}");
    // Two mails that each claim to answer the other do not wait for each other.
    town.letter("m1@people.test", "Subject: x\r\nIn-Reply-To: <m2@people.test>\r\n", "1").await?;
    town.letter("m2@people.test", "Subject: x\r\nIn-Reply-To: <m1@people.test>\r\n", "2").await?;
    for id in ["m1@people.test", "m2@people.test"] {
        let taken = town.inbound(id).await?;
        ensure!(taken["state"] == "started" || taken["state"] == "steered", "{taken}");
    }
    // A word that stops a run starts none.
    town.world.ended(town.inbound("c2@people.test").await?["run"].as_str().context("run")?).await?;
    town.letter("s1@people.test", "Subject: x\r\nIn-Reply-To: <c2@people.test>\r\n", "Stop").await?;
    ensure!(town.inbound("s1@people.test").await?["state"] == "ignored", "`stop` started a run");
    // What was refused can be taken in once its cause is mended.
    town.channel(json!({})).await?;
    let replay = format!("/v1/inbound/{}/replay", states[1]["id"].as_str().context("id")?);
    let (status, answer) = town.world.call(Method::POST, &replay, None).await?;
    ensure!(status == StatusCode::ACCEPTED, "{status} {answer}");
    let again = town.inbound("l3@people.test").await?;
    ensure!(["started", "steered"].iter().any(|state| again["state"] == *state), "{again}");
    ensure!(town.world.call(Method::POST, &replay, None).await?.0 == StatusCode::UNPROCESSABLE_ENTITY, "replayed twice");
    town.world.finish().await
}

#[tokio::test]
async fn the_listener_takes_only_what_it_can_keep_and_answers_each_recipient() -> Result<()> {
    let town = Town::build().await?;
    let helper = format!("helper@{AGENTS}");
    let last = |answers: Vec<String>| answers.last().cloned().unwrap_or_default();
    let mail = |id: &str| format!("From: ann@{PEOPLE}\r\nMessage-ID: <{id}>\r\n\r\nhello\r\n");
    ensure!(
        last(smtp(town.lmtp, "LHLO", "ann@people.test", "nobody@agents.test", "x").await?).starts_with("550 5.1.1"),
        "unknown recipient"
    );
    ensure!(last(smtp(town.lmtp, "LHLO", "ann@people.test", &helper, &mail("k1@x")).await?).starts_with("250"), "kept");
    ensure!(last(smtp(town.lmtp, "EHLO", "ann@people.test", &helper, &mail("k1@x")).await?).starts_with("250"), "known again");
    ensure!(town.world.count("select count(*) from inbound where message_key = 'k1@x'").await? == 1, "kept twice");
    // One that shares no commit with others is known again too.
    let long = format!("{}{}", mail("k6@x"), format!("{}\r\n", "y".repeat(998)).repeat(400));
    for _ in 0..2 {
        ensure!(last(smtp(town.lmtp, "LHLO", "ann@people.test", &helper, &long).await?).starts_with("250"), "a long mail");
    }
    ensure!(town.world.count("select count(*) from inbound where message_key = 'k6@x'").await? == 1, "a long mail was kept twice");
    let large = format!("{}{}", mail("k2@x"), format!("{}\r\n", "y".repeat(998)).repeat(28_000));
    ensure!(last(smtp(town.lmtp, "LHLO", "ann@people.test", &helper, &large).await?).starts_with("552"), "too large");
    // When the row cannot be written the mail server hears 451 and brings it again (KEPT).
    sqlx::raw_sql("alter table inbound rename to elsewhere").execute(&town.world.db).await?;
    let answer = last(smtp(town.lmtp, "LHLO", "ann@people.test", &helper, &mail("k3@x")).await?);
    ensure!(answer.starts_with("451"), "{answer}");
    town.letter("k4@people.test", "Subject: patience\r\n", "hello").await?;
    sqlx::raw_sql("alter table elsewhere rename to inbound").execute(&town.world.db).await?;
    ensure!(town.inbound("k4@people.test").await?["state"] == "started", "the mail server's second try");
    // The hook takes the same, for its password only.
    let channel = town.world.get("/v1/channels/mail").await?;
    ensure!(!channel.to_string().contains("sesame") && channel["secrets"] == json!(["hook_password"]), "{channel}");
    let url = format!("{}{}?from=ann@people.test&to={helper}", town.world.url, channel["hook"].as_str().context("hook")?);
    let post = async |password: &str, id: &str| -> Result<StatusCode> {
        Ok(town.world.client.post(&url).basic_auth("mail", Some(password)).body(mail(id)).send().await?.status())
    };
    ensure!(post("wrong", "k5@x").await? == StatusCode::UNAUTHORIZED, "a wrong password");
    ensure!(post("open sesame", "k5@x").await? == StatusCode::OK && post("open sesame", "k5@x").await? == StatusCode::OK, "the hook");
    ensure!(town.inbound("k5@x").await?["state"] == "refused", "nobody vouches for a mail that came by the hook without results");
    ensure!(!town.world.dump()?.contains("open sesame"), "a secret stands in the dump in clear");
    town.world.finish().await
}

#[tokio::test]
async fn an_answer_that_comes_back_is_told_where_its_owner_looks() -> Result<()> {
    let town = Town::build().await?;
    let given_up = async |id: &str, reply_to: &str| -> Result<Value> {
        town.letter(id, &format!("Subject: x\r\nReply-To: {reply_to}\r\n"), "hello").await?;
        let run = town.inbound(id).await?["run"].as_str().context("run")?.to_owned();
        let found = wait_for("the delivery to be given up", SOON, async || {
            let deliveries = town.world.get(&format!("/v1/runs/{run}/deliveries")).await.ok()?;
            deliveries["items"].as_array()?.iter().find(|delivery| delivery["state"] == "dead").cloned()
        });
        found.await.with_context(|| town.postfix.log())
    };
    // The mail server refuses the address at once, and for good.
    let refused = given_up("r1@people.test", &format!("gone@{PEOPLE}")).await?;
    ensure!(refused["attempts"] == 1 && refused["answer"].as_str().is_some_and(|answer| answer.contains("SMTP 550")), "{refused}");
    // It takes the answer, cannot bring it, and sends its report to us.
    let delivery = given_up("r2@people.test", &format!("gone@{NOWHERE}")).await?;
    let answer = delivery["answer"].as_str().context("answer")?;
    ensure!(delivery["kind"] == "thread" && answer.starts_with("it came back: ") && answer.contains("no channel takes mail"), "{delivery}");
    let page = town.world.get("/v1/inbound").await?;
    let report = page["items"].as_array().and_then(|items| items.iter().find(|item| item["state"] == "ignored")).context("the report")?;
    ensure!(report["reason"].as_str().zip(delivery["id"].as_str()).is_some_and(|(reason, id)| reason.contains(id)), "{report}");
    ensure!(town.world.count("select count(*) from run").await? == 2, "a report started a run");
    town.world.finish().await
}

#[tokio::test]
async fn people_are_told_how_their_messages_stand_and_a_reply_that_came_too_late_starts_the_next_run() -> Result<()> {
    let town = Town::build().await?;
    // A paused channel keeps what comes, and takes it in when it is resumed.
    let pause = async |action: &str| town.world.call(Method::POST, &format!("/v1/channels/mail/{action}"), None).await;
    ensure!(pause("pause").await?.0 == StatusCode::NO_CONTENT, "pause");
    town.letter("p1@people.test", "Subject: long work\r\n", "wait for my word").await?;
    wait_for("the message to wait", SOON, async || {
        let page = town.world.get("/v1/inbound").await.ok()?;
        page["items"].as_array()?.iter().any(|item| item["state"] == "waiting" && item["reason"] == "its channel is paused").then_some(())
    })
    .await?;
    ensure!(town.world.count("select count(*) from run").await? == 0, "a paused channel started a run");
    ensure!(pause("resume").await?.0 == StatusCode::NO_CONTENT, "resume");
    let started = town.inbound("p1@people.test").await?;
    let run = started["run"].as_str().context("run")?.to_owned();
    town.world.until(&run, SOON, |run| run["state"] == "running").await?;

    // Nobody answers for a while: the message is acknowledged with its run.
    let text = text_of(&town.answers(1).await?)?;
    ensure!(text.starts_with(&format!("{run} works on this")), "{text}");

    // `status` is answered, and is no word to the agent.
    town.letter("p2@people.test", "Subject: x\r\nIn-Reply-To: <p1@people.test>\r\n", "status\r\n\r\n> what you wrote").await?;
    ensure!(town.inbound("p2@people.test").await?["state"] == "answered", "`status` was not answered");
    let text = text_of(&town.answers(2).await?)?;
    ensure!(text.starts_with(&format!("{run} works. Started ")), "{text}");

    // A reply that the agent ends without reading is not lost: it starts the next run. Its quotation is left out, and goes along as a file.
    town.letter("p3@people.test", "Subject: x\r\nIn-Reply-To: <p1@people.test>\r\n", "go on").await?;
    let quoting = "and then this\r\n\r\nOn Tue, 1 Dec 2026 at 10:00, Helper <helper@agents.test> wrote:\r\n> what you wrote";
    town.letter("p4@people.test", "Subject: x\r\nIn-Reply-To: <p1@people.test>\r\n", quoting).await?;
    let next = wait_for("the late reply's run", SOON, async || {
        let page = town.world.get("/v1/inbound").await.ok()?;
        let late = page["items"].as_array()?.iter().find(|item| item["state"] == "started" && item["run"] != run.as_str())?.clone();
        Some(late["run"].as_str()?.to_owned())
    })
    .await
    .with_context(|| town.world.logs())?;
    town.world.ended(&next).await?;
    let result = town.world.get(&format!("/v1/runs/{next}")).await?;
    ensure!(result["prompt"].as_str().is_some_and(|prompt| prompt.starts_with("and then this\n\n[the quoted text")), "{result}");
    ensure!(result["result"]["text"].as_str().is_some_and(|text| text.contains("run 2") && text.contains("'message.txt'")), "{result}");

    // Somebody who is known and may not is told why.
    town.channel(json!({ "access": "private", "users": {} })).await?;
    town.letter("p5@people.test", "Subject: may I\r\n", "hello").await?;
    ensure!(town.inbound("p5@people.test").await?["state"] == "refused", "let in");
    let told = wait_for("the refusal", SOON, async || {
        let mails = town.postfix.mailbox().ok()?;
        mails.into_iter().find_map(|mail| text_of(&mail).ok().filter(|text| text.contains("was not taken")))
    })
    .await?;
    ensure!(told.contains("is not in `users` of this channel"), "{told}");
    town.world.finish().await
}

/// The mail with a signature of `domain`.
fn signed(key: &[u8], domain: &str, mail: &str) -> Result<String> {
    let key = Ed25519Key::from_pkcs8_der(key).map_err(|error| anyhow::anyhow!("{error}"))?;
    let signature = DkimSigner::from_key(key).domain(domain).selector("s").headers(["From", "Subject"]).sign(mail.as_bytes());
    Ok(format!("{}{mail}", signature.map_err(|error| anyhow::anyhow!("{error}"))?.to_header()))
}

#[tokio::test]
async fn without_a_mail_server_that_vouches_the_author_is_proved_by_signature_and_dns_and_a_silent_dns_sends_nobody_away() -> Result<()> {
    let town = Town::build().await?;
    let helper = format!("helper@{AGENTS}");
    let channel = json!({ "name": "mail", "agent": "helper", "access": "internal", "members": ["signed.test"],
        "mail": { "addresses": [&helper], "smtp": { "host": "127.0.0.1", "port": town.postfix.port, "tls": "none" } } });
    let (status, answer) = town.world.call(Method::PUT, "/v1/channels/mail", Some(&channel)).await?;
    ensure!(status.is_success(), "{status} {answer}");
    let key = Ed25519Key::generate_pkcs8().map_err(|error| anyhow::anyhow!("{error}"))?;
    let public = Ed25519Key::from_pkcs8_der(&key).map_err(|error| anyhow::anyhow!("{error}"))?.public_key();
    use base64::Engine as _;
    let record = format!("v=DKIM1; k=ed25519; p={}", base64::engine::general_purpose::STANDARD.encode(public));
    for domain in ["signed.test", "elsewhere.test"] {
        town.dns.set(&format!("s._domainkey.{domain}"), &record);
        town.dns.set(&format!("_dmarc.{domain}"), "v=DMARC1; p=reject");
    }
    let send = async |id: &str, content: String| -> Result<Value> {
        let answers = smtp(town.lmtp, "LHLO", "forwarder@relay.test", &helper, &content).await?;
        ensure!(answers.last().is_some_and(|answer| answer.starts_with("250")), "{answers:?}");
        town.inbound(id).await
    };
    let mail = |id: &str| format!("From: ann@signed.test\r\nSubject: hi\r\nMessage-ID: <{id}>\r\n\r\nhello\r\n");
    // Through a forwarder, whose address no SPF record names: the signature outlives that (C13).
    let proven = send("d1@x", signed(&key, "signed.test", &mail("d1@x"))?).await?;
    ensure!(proven["state"] == "started", "{proven}");
    // Not signed; signed by another domain; changed after it was signed (C10, C14).
    let changed = signed(&key, "signed.test", &mail("d4@x"))?.replace("hello", "other");
    for (id, content) in [("d2@x", mail("d2@x")), ("d3@x", signed(&key, "elsewhere.test", &mail("d3@x"))?), ("d4@x", changed)] {
        let forged = send(id, content).await?;
        ensure!(forged["state"] == "refused" && forged["reason"].as_str().is_some_and(|why| why.contains("nobody vouches")), "{forged}");
    }
    // While DNS fails, or says nothing at all, nobody can tell, so the message waits (UNSURE); then it is taken in.
    for (mood, id) in [(Mood::Broken, "d5@x"), (Mood::Mute, "d6@x")] {
        town.dns.be(mood);
        let answers = smtp(town.lmtp, "LHLO", "ann@signed.test", &helper, &signed(&key, "signed.test", &mail(id))?).await?;
        ensure!(answers.last().is_some_and(|answer| answer.starts_with("250")), "{answers:?}");
        wait_for("the message to wait for DNS", SOON, async || {
            let page = town.world.get("/v1/inbound").await.ok()?;
            let waits = |item: &&Value| item["state"] == "waiting" && item["reason"].as_str().is_some_and(|why| why.contains("DNS"));
            page["items"].as_array()?.iter().find(waits).map(|_| ())
        })
        .await
        .with_context(|| format!("{mood:?}\n{}", town.world.logs()))?;
        town.dns.be(Mood::Well);
        let taken = town.inbound(id).await?;
        ensure!(taken["state"] == "started", "{mood:?}: {taken}");
    }
    town.world.finish().await
}

#[tokio::test]
async fn the_owner_of_a_channel_is_told_of_answers_that_were_given_up_and_of_stopped_threads() -> Result<()> {
    let town = Town::build().await?;
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYqr";
    let owner = Receiver::start(&["200 OK"]).await?;
    let more = json!({ "notify": owner.url, "secrets": { "notify_secret": secret }, "messages_per_hour": 1 });
    town.channel(more).await?;
    town.letter("o1@people.test", &format!("Subject: x\r\nReply-To: gone@{PEOPLE}\r\n"), "hello").await?;
    let run = town.inbound("o1@people.test").await?["run"].as_str().context("run")?.to_owned();
    let told = async |what: &str| {
        wait_for("the owner to be told", SOON, async || {
            owner.received().into_iter().find(|post| String::from_utf8_lossy(&post.body).contains(what))
        })
        .await
        .with_context(|| town.world.logs())
    };
    let post = told("was given up").await?;
    let headers = post.headers.iter().map(|(name, value)| Ok((name.parse()?, value.parse()?))).collect::<Result<_>>()?;
    standardwebhooks::Webhook::new(secret)?.verify(&post.body, &headers)?;
    let body: Value = serde_json::from_slice(&post.body)?;
    ensure!(body["type"] == "channel.notice" && body["data"]["run"] == run.as_str() && body["data"]["channel"] == "mail", "{body}");
    ensure!(body["data"]["what"].as_str().is_some_and(|what| what.contains("SMTP 550")), "{body}");
    town.letter("o2@people.test", "Subject: x\r\nIn-Reply-To: <o1@people.test>\r\n", "again").await?;
    ensure!(town.inbound("o2@people.test").await?["state"] == "refused", "the thread was not stopped");
    told("messages_per_hour").await?;
    ensure!(!town.world.dump()?.contains(secret), "a secret stands in the dump in clear");
    town.world.finish().await
}
