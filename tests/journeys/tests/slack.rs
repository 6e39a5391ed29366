//! Slack, end to end, against a stand-in of its Web API that keeps to its documentation and misbehaves on request.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stage::{
    slack::{BOT_TOKEN, BOT_USER, Event, Fault, SIGNING_SECRET, Slack, TEAM, command, direct, mention, message, press},
    wait_for,
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
result = "**run %d** of this thread; files %s; heard %s; %s" % (n, files, heard, task.replace("\n", " | "))
if "file" in task:
    pathlib.Path("/workspace/outputs/report.txt").write_text("run %d\n" % n)
if "shout" in task:
    result = "Hey <!channel> <@U0ANN> `<!here>` **loud**"
if "long" in task:
    result = "# Long\n\n```\n" + "".join("line %d & more\n" % i for i in range(3000)) + "```\n"
pathlib.Path(os.environ["TOWPATH_RESULT_FILE"]).write_text(result)
"##;
const ANN: &str = "U0ANN";
const STRANGER: &str = "U0STRANGER";
/// How much faster all waits are where Slack misbehaves.
const FAST: [(&str, &str); 1] = [("TOWPATH_TIME_SCALE", "0.1")];

struct Office {
    world: World,
    slack: Slack,
    hook: String,
}

impl Office {
    async fn build(settings: &[(&str, &str)], more: Value) -> Result<Self> {
        let slack = Slack::start().await?;
        slack.channel("C1");
        let world = World::prepare(Ground::shared().await?, settings).await?;
        world.spawn("all", &["dev"])?;
        world.ready().await?;
        world.agent("helper", &["/usr/bin/python3", "-c", AGENT], json!({})).await?;
        let mut office = Self { world, slack, hook: String::new() };
        office.hook = office.apply(more).await?;
        Ok(office)
    }

    /// The address of the channel's hook.
    async fn apply(&self, more: Value) -> Result<String> {
        let mut definition = json!({
            "name": "slack", "agent": "helper", "users": { ANN: "ann" }, "slack": { "api": self.slack.url },
            "secrets": { "signing_secret": SIGNING_SECRET, "bot_token": BOT_TOKEN },
        });
        if let (Some(definition), Some(more)) = (definition.as_object_mut(), more.as_object()) {
            definition.extend(more.clone());
        }
        let (status, channel) = self.world.call(Method::PUT, "/v1/channels/slack", Some(&definition)).await?;
        ensure!(status.is_success(), "{status} {channel}");
        Ok(format!("{}{}", self.world.url, channel["hook"].as_str().context("hook")?))
    }

    /// As Slack posts it.
    async fn post(&self, body: &str, retry: usize) -> Result<(StatusCode, String)> {
        let now = towpath_chassis::clock::wall().timestamp();
        let media_type = if body.starts_with('{') { "application/json" } else { "application/x-www-form-urlencoded" };
        let mut request = self.world.client.post(&self.hook).header("content-type", media_type);
        request = request.header("x-slack-request-timestamp", now.to_string()).header("x-slack-signature", Slack::sign(now, body));
        if retry > 0 {
            request = request.header("x-slack-retry-num", retry.to_string()).header("x-slack-retry-reason", "http_timeout");
        }
        let answer = request.body(body.to_owned()).send().await?;
        Ok((answer.status(), answer.text().await?))
    }

    async fn send(&self, event: &Event) -> Result<()> {
        let (status, answer) = self.post(&event.body, 0).await?;
        ensure!(status == StatusCode::OK, "{status} {answer}");
        Ok(())
    }

    /// A person calls the agent; the message's `ts`.
    async fn call(&self, text: &str, thread: Option<&str>) -> Result<String> {
        let text = format!("<@{BOT_USER}> {text}");
        let ts = self.slack.say("C1", ANN, &text, thread);
        self.send(&mention("C1", ANN, &text, &ts, thread)).await?;
        Ok(ts)
    }

    /// What became of a message, once something has.
    async fn inbound(&self, ts: &str) -> Result<Value> {
        let key = format!("{TEAM}/C1/{ts}");
        let found = wait_for("the message to be taken in", SOON, async || {
            let row: Option<(uuid::Uuid,)> = sqlx::query_as("select id from inbound where message_key = $1 and next_attempt_at is null")
                .bind(&key)
                .fetch_optional(&self.world.db)
                .await
                .ok()?;
            Some(format!("inb_{}", row?.0.as_simple()))
        })
        .await
        .with_context(|| self.world.logs())?;
        let page = self.world.get("/v1/inbound").await?;
        let items = page["items"].as_array().context("items")?;
        items.iter().find(|item| item["id"] == found.as_str()).cloned().context("listed")
    }

    /// What the agent has posted in a thread, in order.
    fn posted(&self, channel: &str, thread: Option<&str>) -> Vec<Value> {
        let ours = |message: &Value| message["user"] == BOT_USER && (thread.is_none() || message["thread_ts"].as_str() == thread);
        self.slack.messages(channel).into_iter().filter(ours).collect()
    }

    /// The first of them that says this.
    async fn said(&self, thread: &str, what: &str) -> Result<Value> {
        wait_for(&format!("`{what}` in the thread"), SOON, async || {
            self.posted("C1", Some(thread)).into_iter().find(|message| text_of(message).contains(what))
        })
        .await
        .with_context(|| format!("{:?}\n{}", self.posted("C1", None), self.world.logs()))
    }

    async fn settled(&self) -> Result<()> {
        wait_for("all deliveries to be through", SOON, async || {
            (self.world.count("select count(*) from delivery where ended_at is null").await.ok()? == 0).then_some(())
        })
        .await
        .with_context(|| self.world.logs())
    }
}

fn text_of(message: &Value) -> String {
    message["text"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_mention_is_answered_in_its_thread_steered_by_a_reply_and_followed_by_the_next_run_in_the_same_workspace() -> Result<()> {
    let office = Office::build(&[], json!({})).await?;
    let text = format!("<@{BOT_USER}> please make a file &amp; tell");
    let root = office.slack.say("C1", ANN, &text, None);
    let mut first = mention("C1", ANN, &text, &root, None);
    first.with_files(&[office.slack.file("numbers.csv", b"1,2\n")]);
    office.send(&first).await?;
    let answer = office.said(&root, "*run 1* of this thread").await?;
    let text = text_of(&answer);
    ensure!(text.contains("files ['numbers.csv']; heard []; please make a file &amp; tell") && text.contains("— helper · run_"), "{text}");
    ensure!(answer["metadata"]["event_type"] == "towpath_delivery", "{answer}");
    let shared = wait_for("the file", SOON, async || {
        office.posted("C1", Some(&root)).into_iter().find(|message| message["files"][0]["name"] == "report.txt")
    })
    .await?;
    let id = shared["files"][0]["id"].as_str().context("id")?;
    ensure!(office.slack.file_content(id).as_deref() == Some(b"run 1\n"), "another file");
    let started = office.inbound(&root).await?;
    ensure!(started["state"] == "started" && started["author"] == ANN, "{started}");

    // A reply after the end, without a mention: the next run, in the same workspace.
    let reply = office.slack.say("C1", ANN, "wait for my word", Some(&root));
    office.send(&message("C1", ANN, "wait for my word", &reply, Some(&root))).await?;
    let second = office.inbound(&reply).await?;
    ensure!(second["state"] == "started" && second["thread"] == started["thread"], "{second}");
    let run = second["run"].as_str().context("run")?.to_owned();
    office.world.until(&run, SOON, |run| run["state"] == "running").await?;
    // A reply while it runs steers it.
    let word = office.slack.say("C1", ANN, "go on", Some(&root));
    office.send(&message("C1", ANN, "go on", &word, Some(&root))).await?;
    ensure!(office.inbound(&word).await?["state"] == "steered", "no steer");
    let text = text_of(&office.said(&root, "*run 2* of this thread").await?);
    ensure!(text.contains("files ['numbers.csv']; heard ['go on']"), "{text}");
    let principals: i64 = office.world.count("select count(distinct principal_id) from run").await?;
    ensure!(principals == 1, "Ann was two people");
    office.world.finish().await
}

#[tokio::test]
async fn however_often_and_in_whatever_order_events_come_each_message_is_one_run_a1_a2_a3_a5_a6() -> Result<()> {
    let office = Office::build(&[], json!({ "acknowledge": false })).await?;
    // The same event four times, at once (A1, A3).
    let text = format!("<@{BOT_USER}> once");
    let root = office.slack.say("C1", ANN, &text, None);
    let event = mention("C1", ANN, &text, &root, None);
    let answers = futures::future::join_all((0..4).map(|retry| office.post(&event.body, retry))).await;
    ensure!(answers.iter().all(|answer| answer.as_ref().is_ok_and(|(status, _)| *status == StatusCode::OK)), "{answers:?}");
    // Its twin with an id of its own (A5).
    office.send(&message("C1", ANN, &text, &root, None)).await?;
    // A repetition whose first never came (A2).
    let late = office.slack.say("C1", ANN, &text, None);
    let (status, _) = office.post(&mention("C1", ANN, &text, &late, None).body, 2).await?;
    ensure!(status == StatusCode::OK, "{status}");
    // In a thread both of a mention come, in either order.
    let twin = office.slack.say("C1", ANN, &text, Some(&late));
    office.send(&message("C1", ANN, &text, &twin, Some(&late))).await?;
    office.send(&mention("C1", ANN, &text, &twin, Some(&late))).await?;
    for ts in [&root, &late, &twin] {
        let state = office.inbound(ts).await?["state"].clone();
        ensure!(state == "started" || state == "steered", "{ts}: {state}");
    }
    ensure!(office.world.count("select count(*) from inbound").await? == 3, "a message was doubled");

    // A reply that comes before the message that called us waits for it and is no run of its own.
    let root = office.slack.say("C1", ANN, &text, None);
    let reply = office.slack.say("C1", ANN, "and this", Some(&root));
    office.send(&message("C1", ANN, "and this", &reply, Some(&root))).await?;
    wait_for("the reply to wait", SOON, async || {
        let waits = "select count(*) from inbound where state = 'waiting' and reason like 'it calls nobody%'";
        (office.world.count(waits).await.ok()? == 1).then_some(())
    })
    .await?;
    office.send(&mention("C1", ANN, &text, &root, None)).await?;
    let (first, second) = (office.inbound(&root).await?, office.inbound(&reply).await?);
    ensure!(first["thread"] == second["thread"] && first["state"] == "started", "{first} {second}");

    // People who speak with each other are left alone, and nothing of what they said is kept.
    let foreign = office.slack.say("C1", STRANGER, "lunch?", None);
    let reply = office.slack.say("C1", STRANGER, "yes", Some(&foreign));
    office.send(&message("C1", STRANGER, "lunch?", &foreign, None)).await?;
    office.send(&message("C1", STRANGER, "yes", &reply, Some(&foreign))).await?;
    ensure!(
        office.world.count("select count(*) from inbound where author = 'U0STRANGER' or author is null").await? == 1,
        "it was not kept for now"
    );
    sqlx::query(
        "update inbound set created_at = now() - interval '10 minutes', next_attempt_at = now() where run_id is null and thread_id is null",
    )
    .execute(&office.world.db)
    .await?;
    wait_for("it to be forgotten", SOON, async || {
        (office.world.count("select count(*) from inbound where thread_id is null").await.ok()? == 0).then_some(())
    })
    .await?;
    ensure!(office.posted("C1", Some(&foreign)).is_empty(), "strangers were spoken to");
    office.world.finish().await
}

#[tokio::test]
async fn what_slack_has_not_signed_or_programs_wrote_starts_nothing_a7_a14_a17() -> Result<()> {
    let office = Office::build(&[], json!({})).await?;
    let (status, answer) = office.post(r#"{"token":"x","challenge":"3eZbrw1a","type":"url_verification"}"#, 0).await?;
    ensure!(status == StatusCode::OK && answer == "3eZbrw1a", "{status} {answer}");
    let root = office.slack.say("C1", ANN, "x", None);
    let event = mention("C1", ANN, "x", &root, None);
    let now = towpath_chassis::clock::wall().timestamp();
    for (at, signature) in
        [(now, "v0=00".to_owned()), (now - 400, Slack::sign(now - 400, &event.body)), (now, Slack::sign(now, "another body"))]
    {
        let request = office.world.client.post(&office.hook).header("x-slack-request-timestamp", at.to_string());
        let answer = request.header("x-slack-signature", signature).body(event.body.clone()).send().await?;
        ensure!(answer.status() == StatusCode::UNAUTHORIZED, "{}", answer.status());
    }
    // Our own message, and one of another program that calls us by name.
    office.send(&message("C1", BOT_USER, "me", "1.5", Some(&root))).await?;
    let mut program = mention("C1", "U0PROGRAM", "x", "1.6", None);
    program.change(|event| event["bot_id"] = json!("B0OTHER"));
    office.send(&program).await?;
    ensure!(office.inbound("1.6").await?["state"] == "ignored", "a program started something");
    // Signed, and nothing that anybody can read: kept, shown, and in nobody's way.
    let (status, _) = office.post(r#"{"type":"event_callback","event":7}"#, 0).await?;
    ensure!(status == StatusCode::OK, "{status}");
    // A stranger is told why, in the thread.
    let stranger = office.slack.say("C1", STRANGER, "x", None);
    office.send(&mention("C1", STRANGER, "x", &stranger, None)).await?;
    ensure!(office.inbound(&stranger).await?["state"] == "refused", "a stranger was let in");
    office.said(&stranger, "is not in `users`").await?;
    ensure!(office.world.count("select count(*) from run").await? == 0, "something was started");
    let states = office.world.count("select count(*) from inbound where state = 'refused' and reason like '%documents%'").await?;
    ensure!(states == 1, "the unreadable one is not shown");
    office.world.finish().await
}

#[tokio::test]
async fn an_answer_is_there_exactly_once_whatever_slack_does_with_it_b11_b13_b15_b19() -> Result<()> {
    let office = Office::build(&FAST, json!({ "acknowledge": false })).await?;
    let faults = [
        ("chat.postMessage", Fault::LostAnswer),
        ("chat.postMessage", Fault::Late(Duration::from_millis(700))),
        ("chat.postMessage", Fault::Refused),
        ("chat.postMessage", Fault::Status(502)),
        ("chat.postMessage", Fault::Html),
        ("chat.postMessage", Fault::NoTs),
        ("chat.postMessage", Fault::RateLimited(1)),
        ("chat.postMessage", Fault::Error("internal_error")),
        ("chat.postMessage", Fault::Error("some_new_error")),
        ("files.completeUploadExternal", Fault::LostAnswer),
        ("files.completeUploadExternal", Fault::Late(Duration::from_millis(700))),
        ("files.getUploadURLExternal", Fault::Status(500)),
        ("upload", Fault::LostAnswer),
        ("upload", Fault::Refused),
    ];
    for (method, fault) in faults {
        let called = office.slack.calls(method);
        office.slack.fail(method, fault.clone(), 1);
        let root = office.call("make a file", None).await?;
        office.said(&root, "*run 1*").await.with_context(|| format!("{method} {fault:?}"))?;
        wait_for("the file", SOON, async || {
            office.posted("C1", Some(&root)).iter().any(|message| message["files"][0]["name"] == "report.txt").then_some(())
        })
        .await
        .with_context(|| format!("{method} {fault:?}\n{}", office.world.logs()))?;
        office.settled().await?;
        let posted = office.posted("C1", Some(&root));
        let count = |wanted: &dyn Fn(&Value) -> bool| posted.iter().filter(|message| wanted(message)).count();
        let (texts, files) = (count(&|message| text_of(message).contains("*run 1*")), count(&|message| message["files"].is_array()));
        ensure!((texts, files) == (1, 1), "{method} {fault:?}: {texts} texts, {files} files\n{posted:#?}\n{}", office.world.logs());
        ensure!(office.slack.calls(method) > called, "{method} was not called");
    }
    ensure!(office.world.count("select count(*) from delivery where state <> 'delivered'").await? == 0, "not all were delivered");
    office.world.finish().await
}

#[tokio::test]
async fn a_place_that_is_gone_is_told_to_whoever_asked_and_a_revoked_token_loses_nothing_b9_b10() -> Result<()> {
    let owner = Receiver::start(&["200 OK"]).await?;
    let office = Office::build(&FAST, json!({ "acknowledge": false, "notify": owner.url })).await?;
    let root = office.call("wait for it", None).await?;
    let run = office.inbound(&root).await?["run"].as_str().context("run")?.to_owned();
    office.world.until(&run, SOON, |run| run["state"] == "running").await?;
    office.slack.archive("C1");
    office.world.steer(&run, "go on").await?;
    let direct_channel = format!("D{}", ANN.trim_start_matches('U'));
    let posted = wait_for("the author to be told", SOON, async || office.posted(&direct_channel, None).into_iter().next())
        .await
        .with_context(|| office.world.logs())?;
    let text = text_of(&posted);
    ensure!(text.contains("is_archived") && text.contains("*run 1*"), "{text}");
    office.settled().await?;

    // The token is revoked while a run works.
    office.slack.channel("C1");
    let root = office.call("wait for it", None).await?;
    let run = office.inbound(&root).await?["run"].as_str().context("run")?.to_owned();
    office.world.until(&run, SOON, |run| run["state"] == "running").await?;
    office.slack.revoke();
    office.world.steer(&run, "go on").await?;
    let told = wait_for("the owner to be told", SOON, async || {
        owner.received().into_iter().find(|post| String::from_utf8_lossy(&post.body).contains("channel.broken"))
    })
    .await
    .with_context(|| office.world.logs())?;
    ensure!(String::from_utf8_lossy(&told.body).contains("token_revoked"), "{}", String::from_utf8_lossy(&told.body));
    let ready: Value = office.world.client.get(format!("{}/readyz", office.world.url)).send().await?.json().await?;
    ensure!(ready["channels_broken"] == 1 && ready["ready"] == true, "{ready}");
    // While it is broken Slack is left alone: another answer that is owed makes no more calls than the one that tries.
    office.slack.restore();
    office.apply(json!({ "acknowledge": false, "notify": owner.url })).await?;
    office.said(&root, "*run 1*").await?;
    office.settled().await?;
    let ready: Value = office.world.client.get(format!("{}/readyz", office.world.url)).send().await?.json().await?;
    ensure!(ready["channels_broken"] == 0, "{ready}");
    office.world.finish().await
}

#[tokio::test]
async fn long_answers_are_divided_and_loud_ones_mention_nobody_b1_b2_b3_b6() -> Result<()> {
    let office = Office::build(&[], json!({ "acknowledge": false })).await?;
    let root = office.call("shout", None).await?;
    let text = text_of(&office.said(&root, "*loud*").await?);
    ensure!(text.starts_with("Hey &lt;!channel&gt; &lt;@U0ANN&gt; `&lt;!here&gt;` *loud*"), "{text}");
    let root = office.call("be long", None).await?;
    wait_for("the whole as a file", SOON, async || {
        office.posted("C1", Some(&root)).iter().any(|message| message["files"][0]["name"] == "result.md").then_some(())
    })
    .await
    .with_context(|| office.world.logs())?;
    let posted = office.posted("C1", Some(&root));
    let texts: Vec<String> = posted.iter().filter(|message| !message["files"].is_array()).map(text_of).collect();
    ensure!((2..=5).contains(&texts.len()), "{} messages", texts.len());
    ensure!(texts.iter().all(|text| text.matches("```").count() % 2 == 0 && text.chars().count() <= 4000), "{texts:?}");
    let id = posted.iter().find_map(|message| message["files"][0]["id"].as_str()).context("file")?;
    let whole = String::from_utf8(office.slack.file_content(id).context("content")?)?;
    ensure!(whole.contains("line 2999 & more"), "the file is cut");
    // Slack counts otherwise than it says: nothing of the answer is lost.
    office.slack.fail("chat.postMessage", Fault::Error("msg_too_long"), 1);
    let root = office.call("tell", None).await?;
    office.said(&root, "[this part is in part-1.txt]").await?;
    wait_for("the part as a file", SOON, async || {
        office.posted("C1", Some(&root)).iter().any(|message| message["files"][0]["name"] == "part-1.txt").then_some(())
    })
    .await?;
    office.world.finish().await
}

#[tokio::test]
async fn a_run_is_acknowledged_canceled_by_its_button_and_its_acknowledgement_says_how_it_ended() -> Result<()> {
    let office = Office::build(&FAST, json!({})).await?;
    let root = office.call("wait for it", None).await?;
    let run = office.inbound(&root).await?["run"].as_str().context("run")?.to_owned();
    let told = office.said(&root, "works on this").await?;
    let button = &told["blocks"][1]["elements"][0];
    ensure!(button["action_id"] == "cancel" && button["value"] == run.as_str(), "{told}");
    // A stranger's press changes nothing.
    let press = |user: &str| press("C1", user, told["ts"].as_str().unwrap_or_default(), &root, button);
    let (status, _) = office.post(&press(STRANGER), 0).await?;
    ensure!(status == StatusCode::OK, "{status}");
    wait_for("the press to be refused", SOON, async || {
        (office.world.count("select count(*) from inbound where state = 'refused'").await.ok()? == 1).then_some(())
    })
    .await?;
    let (status, _) = office.post(&press(ANN), 0).await?;
    ensure!(status == StatusCode::OK, "{status}");
    let ended = office.world.ended(&run).await?;
    ensure!(ended["state"] == "canceled", "{ended}");
    wait_for("the acknowledgement to say so", SOON, async || {
        let now = office.posted("C1", Some(&root)).into_iter().find(|message| message["ts"] == told["ts"])?;
        (text_of(&now).contains("was canceled") && now["blocks"].as_array().is_none_or(Vec::is_empty)).then_some(())
    })
    .await
    .with_context(|| office.world.logs())?;
    // The button of a run that has ended cancels no later one.
    let reply = office.slack.say("C1", ANN, "wait for it again", Some(&root));
    office.send(&message("C1", ANN, "wait for it again", &reply, Some(&root))).await?;
    let next = office.inbound(&reply).await?["run"].as_str().context("run")?.to_owned();
    office.post(&press(ANN), 0).await?;
    wait_for("the press to be ignored", SOON, async || {
        (office.world.count("select count(*) from inbound where state = 'ignored'").await.ok()? == 1).then_some(())
    })
    .await?;
    office.world.until(&next, SOON, |run| run["state"] == "running").await?;
    office.world.steer(&next, "go on").await?;
    ensure!(office.world.ended(&next).await?["state"] == "succeeded", "the wrong run was canceled");
    office.world.finish().await
}

#[tokio::test]
async fn a_slash_command_and_a_direct_message_open_threads_of_their_own() -> Result<()> {
    let office = Office::build(&[], json!({})).await?;
    let (status, answer) = office.post(&command("C1", ANN, "tell me"), 0).await?;
    ensure!(status == StatusCode::OK && answer.contains("ephemeral"), "{status} {answer}");
    let opened = wait_for("the thread to be opened", SOON, async || {
        office.posted("C1", None).into_iter().find(|message| text_of(message).contains("asked:"))
    })
    .await
    .with_context(|| office.world.logs())?;
    ensure!(text_of(&opened).starts_with(&format!("<@{ANN}> asked:\n> tell me")), "{opened}");
    office.settled().await?;
    let root = opened["ts"].as_str().context("ts")?;
    // A reply to it goes on in the same workspace.
    let reply = office.slack.say("C1", ANN, "once more", Some(root));
    office.send(&message("C1", ANN, "once more", &reply, Some(root))).await?;
    office.said(root, "*run 2* of this thread").await?;
    ensure!(office.world.count("select count(*) from session").await? == 1, "the reply is of another thread");

    office.slack.channel("D0ANN");
    let ts = office.slack.say("D0ANN", ANN, "hello", None);
    office.send(&direct("D0ANN", ANN, "hello", &ts, None)).await?;
    wait_for("the answer", SOON, async || {
        office.posted("D0ANN", Some(&ts)).iter().any(|message| text_of(message).contains("*run 1*")).then_some(())
    })
    .await
    .with_context(|| office.world.logs())?;
    office.world.finish().await
}

#[tokio::test]
async fn five_thousand_events_while_postgres_restarts_are_one_run_for_each_message() -> Result<()> {
    const EVENTS: usize = 5000;
    const SENDERS: usize = 16;
    let (_folder, servers, ground) = Ground::own_servers().await?;
    let slack = Slack::start().await?;
    slack.channel("C1");
    let world = World::prepare(ground, &[]).await?;
    world.spawn("all", &["dev"])?;
    world.ready().await?;
    world.agent("helper", &["/bin/true"], json!({})).await?;
    let mut office = Office { world, slack, hook: String::new() };
    office.hook = office.apply(json!({ "acknowledge": false, "messages_per_minute": 100_000 })).await?;
    // They are started, and none of them has to run for this.
    sqlx::query("update tenant set paused_at = now()").execute(&office.world.db).await?;
    let messages: Vec<Event> = (0..EVENTS * 7 / 10).map(|n| mention("C1", ANN, "x", &format!("9.{n:06}"), None)).collect();
    // The rest are repetitions of the same event, and twins under another id.
    let twins: Vec<Event> =
        (0..EVENTS * 15 / 100).map(|n| message("C1", ANN, &format!("<@{BOT_USER}> x"), &format!("9.{:06}", n * 2), None)).collect();
    let again = messages.iter().step_by(4).take(EVENTS - messages.len() - twins.len());
    let mut all: Vec<&Event> = messages.iter().chain(&twins).chain(again).collect();
    ensure!(all.len() == EVENTS, "{}", all.len());
    // Mixed, and always in the same way.
    all.sort_by_key(|event| towpath_journeys::sha256(event.body.as_bytes()));
    let (sent, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let sender = async |lane: usize| -> Result<()> {
        for event in all.iter().skip(lane).step_by(SENDERS) {
            // Slack sends again what was not answered with 200.
            for attempt in 0.. {
                ensure!(attempt < 600, "never taken");
                match office.post(&event.body, attempt.min(3)).await {
                    Ok((StatusCode::OK, _)) => break,
                    Ok((StatusCode::SERVICE_UNAVAILABLE, _)) => refused.fetch_add(1, Ordering::Relaxed),
                    Ok((status, answer)) => anyhow::bail!("{status} {answer}"),
                    Err(error) => return Err(error),
                };
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            sent.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    };
    let breaker = async {
        wait_for("a third to be sent", SOON, async || (sent.load(Ordering::Relaxed) > EVENTS / 3).then_some(())).await?;
        servers.postgres.kill9()?;
        wait_for("a refusal", SOON, async || (refused.load(Ordering::Relaxed) > 0).then_some(())).await?;
        servers.postgres.start().await
    };
    let senders = futures::future::try_join_all((0..SENDERS).map(sender));
    futures::future::try_join(senders, breaker).await.with_context(|| office.world.logs())?;
    let count = |sql: &'static str| office.world.count(sql);
    wait_for("all messages to be taken in", SOON * 5, async || {
        (count("select count(*) from inbound where next_attempt_at is not null").await.ok()? == 0).then_some(())
    })
    .await
    .with_context(|| office.world.logs())?;
    let (kept, started, runs) = (
        count("select count(*) from inbound").await?,
        count("select count(*) from inbound where state = 'started' and run_id = id").await?,
        count("select count(*) from run").await?,
    );
    let wanted = i64::try_from(messages.len())?;
    ensure!((kept, started, runs) == (wanted, wanted, wanted), "kept {kept}, started {started}, runs {runs} of {wanted}");
    ensure!(count("select count(*) from dead").await? == 0, "something was laid aside");
    Ok(())
}
