//! People at a run's terminal: several, late ones, ones that drop and come again, and the record of it.

use anyhow::{Context, Result, ensure};
use reqwest::StatusCode;
use serde_json::{Value, json};
use towpath_journeys::{
    AtTerminal, Viewer, World,
    terminal::{pause, same_screen},
};
use towpath_schemas::{
    frame::Size,
    viewer::{FromViewer, ToViewer},
};

const SIZE: Size = Size { cols: 100, rows: 30 };

/// A shell that waits at its prompt.
async fn shell(world: &World) -> Result<String> {
    world.agent("shell", &["/bin/bash", "--norc", "-i"], json!({ "mode": "interactive", "env": { "PS1": "ready> " } })).await?;
    world.start_run(json!({ "agent": "shell", "prompt": "" })).await
}

#[tokio::test]
async fn three_viewers_see_vim_htop_and_a_colour_animation_alike_one_late_one_dropped_for_ten_seconds() -> Result<()> {
    let world = World::start().await?;
    let run = shell(&world).await?;
    let mut person = AtTerminal::start(&world, &["attach", &run], SIZE)?;
    person.shows("ready>").await?;
    let mut first = Viewer::join(&world, &run).await?;
    first.shows("ready>").await?;

    // A full-screen program, whose keys are typed by the person.
    person.type_in("printf 'line %s\\n' $(seq 1 200) > text; vi text\r")?;
    first.shows("line 1").await?;
    person.type_in("100G0iin the middle \x1b")?;
    first.shows("in the middle line 100").await?;
    let mut late = Viewer::join(&world, &run).await?;
    late.shows("in the middle line 100").await?;
    same_screen(&mut first, &mut late).await?;
    ensure!(late.frames <= first.frames, "{} of {} frames", late.frames, first.frames);
    person.shows("in the middle line 100").await?;
    person.type_in(":q!\r")?;
    first.shows("ready>").await?;

    // One that draws by itself.
    person.type_in("htop --delay 5\r")?;
    first.shows("F10Quit").await?;
    let mut joined = Viewer::join(&world, &run).await?;
    joined.shows("F10Quit").await?;
    same_screen(&mut first, &mut joined).await?;
    person.shows("F10Quit").await?;
    person.type_in("q")?;
    first.shows("ready>").await?;

    // Colours all over the screen for several seconds; one viewer is away for most of it, and comes again at the frame that it had.
    let frames = "python3 -c 'import sys,time\nfor i in range(600):\n  sys.stdout.write(\"\".join(\"\\x1b[%d;1H\\x1b[48;2;%d;%d;90m%s\" % (r+1,(i*3+r*8)%256,(r*8)%256,\"~\"*100) for r in range(29))+\"\\x1b[0m\"); sys.stdout.flush(); time.sleep(0.02)\nprint(\"\\x1b[30;1Hdone\")'\r";
    person.type_in(frames)?;
    first.shows("~~~~").await?;
    let dropped = late.hang_up();
    let (taking, again) = tokio::join!(first.shows("done"), async {
        pause(10).await;
        Viewer::join_again(&world, &run, dropped).await
    });
    taking?;
    let mut again = again?;
    again.shows("done").await?;
    same_screen(&mut first, &mut again).await?;
    let mut last = Viewer::join(&world, &run).await?;
    last.shows("done").await?;
    same_screen(&mut first, &mut last).await?;
    person.shows("done").await?;
    let (seen, drawn) = (first.rows(), person.rows());
    ensure!(seen == drawn, "the client shows\n{}\n--- instead of\n{}", drawn.join("\n"), seen.join("\n"));

    person.type_in("\r")?;
    first.shows("ready>").await?;
    person.type_in("exit 3\r")?;
    let left = person.left().await?;
    ensure!(left.code() == Some(1), "{left}");
    first.until("the end", |viewer| viewer.told.iter().any(|told| matches!(told, ToViewer::End { .. }))).await?;
    let ended = world.ended(&run).await?;
    ensure!(ended["state"] == "failed" && ended["exit"]["code"] == 3 && ended["mode"] == "interactive", "{ended}");
    world.finish().await
}

#[tokio::test]
async fn who_may_type_and_whose_window_decides() -> Result<()> {
    let world = World::start().await?;
    let run = shell(&world).await?;
    let mut owner = Viewer::join(&world, &run).await?;
    owner.window(100, 30).await?;
    owner.until("its size", |viewer| viewer.told.contains(&ToViewer::Size { size: SIZE, owner: true })).await?;
    let mut second = Viewer::join(&world, &run).await?;
    second.window(40, 10).await?;
    second.until("the other's size", |viewer| viewer.told.contains(&ToViewer::Size { size: SIZE, owner: false })).await?;
    let number = second.type_in("stty size\r").await?;
    second.until("the answer", |viewer| viewer.told.contains(&ToViewer::Typed { number })).await?;
    owner.shows("30 100").await?;
    second.tell(&FromViewer::Own).await?;
    owner.until("the loss", |viewer| viewer.told.contains(&ToViewer::Size { size: Size { cols: 40, rows: 10 }, owner: false })).await?;

    // The same tenant, without the scope; and another person with it.
    for (name, scopes) in [("tester", vec!["runs"]), ("somebody", vec!["runs", "terminal"])] {
        let (status, token) =
            world.call(reqwest::Method::POST, "/v1/tokens", Some(&json!({ "principal": name, "scopes": scopes, "days": 1 }))).await?;
        ensure!(status.is_success(), "{status} {token}");
        let token = token["secret"].as_str().context("secret")?.to_owned();
        let mut watcher = Viewer::join_as(&world, &run, &token).await?;
        watcher.shows("ready>").await?;
        let number = watcher.type_in("touch /workspace/never\r").await?;
        watcher
            .until("a refusal", |viewer| {
                viewer
                    .told
                    .iter()
                    .any(|told| matches!(told, ToViewer::Refused { number: of, reason } if *of == number && reason.contains("scope")))
            })
            .await?;
    }
    let (_, token) = world.make_tenant("other").await?;
    let refused = Viewer::join_as(&world, &run, &token).await;
    ensure!(refused.is_err_and(|error| error.to_string().contains("404")), "another tenant's terminal");

    let number = owner.type_in("ls /workspace/never; exit\r").await?;
    owner.until("typed", |viewer| viewer.told.contains(&ToViewer::Typed { number })).await?;
    let text = String::from_utf8(world.transcript_when_ended(&run, "format=text").await?)?;
    ensure!(text.contains("No such file"), "{text}");
    world.finish().await
}

#[tokio::test]
async fn a_small_window_shows_the_part_around_the_cursor_and_leaving_ends_nothing() -> Result<()> {
    let world = World::start().await?;
    let run = shell(&world).await?;
    let mut owner = Viewer::join(&world, &run).await?;
    owner.window(100, 30).await?;
    owner.shows("ready>").await?;
    owner.type_in("clear; seq 1 28\r").await?;
    owner.shows("28").await?;
    let mut small = AtTerminal::start(&world, &["attach", &run], Size { cols: 30, rows: 8 })?;
    small.shows("28").await?;
    ensure!(small.rows().iter().any(|row| row == "ready>") && !small.rows().iter().any(|row| row == "5"), "{:?}", small.rows());
    // One who only looks on neither types nor decides the size.
    let mut watcher = AtTerminal::start(&world, &["attach", &run, "--watch"], Size { cols: 60, rows: 20 })?;
    watcher.shows("28").await?;
    watcher.type_in("exit\r")?;
    watcher.type_in("\x03")?;
    ensure!(watcher.left().await?.success(), "an interrupt leaves");
    small.resize(Size { cols: 30, rows: 30 })?;
    small.shows("27").await?;
    small.type_in("\x1d")?;
    ensure!(small.left().await?.success(), "detaching is no failure");
    owner.type_in("echo still $((40+2))\r").await?;
    owner.shows("still 42").await?;
    owner.type_in("exit\r").await?;
    world.ended(&run).await?;
    world.finish().await
}

#[tokio::test]
async fn a_terminal_goes_on_over_a_killed_server_and_types_nothing_twice() -> Result<()> {
    let world = World::prepare(towpath_journeys::Ground::shared().await?, &[]).await?;
    world.spawn("api", &["api"])?;
    world.spawn("worker", &["worker"])?;
    world.ready().await?;
    let run = shell(&world).await?;
    let person = AtTerminal::start(&world, &["attach", &run], SIZE)?;
    person.shows("ready>").await?;
    for round in 0..3 {
        person.type_in(&format!("echo round {round} >> count; wc -l count\r"))?;
        person.shows(&format!("{} count", round + 1)).await?;
        world.kill("api")?;
        world.spawn("api", &["api"])?;
        world.ready().await?;
    }
    person.type_in("exit\r")?;
    let ended = world.ended(&run).await?;
    let session = ended["session"].as_str().context("session")?;
    let count = std::fs::read_to_string(world.workspace(session).join("count"))?;
    ensure!(count == "round 0\nround 1\nround 2\n", "{count}");
    world.finish().await
}

#[tokio::test]
async fn a_recording_plays_to_the_same_last_screen_and_ranges_are_what_they_say() -> Result<()> {
    let world = World::start().await?;
    let run = shell(&world).await?;
    let mut viewer = Viewer::join(&world, &run).await?;
    viewer.window(100, 30).await?;
    viewer.shows("ready>").await?;
    viewer.type_in("for i in $(seq 1 30); do printf '\\e[3%dmrow %d\\e[0m\\n' $((i % 8)) $i; done; tput setaf 2; echo tail\r").await?;
    viewer.shows("tail").await?;
    viewer.type_in("exit\r").await?;
    viewer.until("the end", |viewer| viewer.told.iter().any(|told| matches!(told, ToViewer::End { .. }))).await?;
    let ended = world.ended(&run).await?;
    ensure!(ended["state"] == "succeeded", "{ended}");

    let cast = String::from_utf8(world.transcript(&run, "format=cast").await?)?;
    let mut lines = cast.lines();
    let header: Value = serde_json::from_str(lines.next().context("header")?)?;
    ensure!(header["version"] == 3 && header["term"]["cols"] == 120, "{header}");
    let mut played = towpath_terminal::Screen::new(Size { cols: 120, rows: 40 });
    for line in lines {
        let event: Value = serde_json::from_str(line)?;
        match event[1].as_str() {
            Some("o") => drop(played.print(event[2].as_str().context("data")?.as_bytes())),
            Some("r") => {
                let (cols, rows) = event[2].as_str().and_then(|size| size.split_once('x')).context("size")?;
                played.resize(Size { cols: cols.parse()?, rows: rows.parse()? });
            }
            _ => {}
        }
    }
    ensure!(played.rows() == viewer.rows(), "{}\n--- instead of\n{}", played.rows().join("\n"), viewer.rows().join("\n"));

    // Every frame once in ndjson; two ranges that meet are the whole; by time likewise.
    let whole = world.transcript(&run, "format=ndjson").await?;
    let frames: Vec<Value> = String::from_utf8(whole.clone())?.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let seqs: Vec<u64> = frames.iter().filter_map(|frame| frame["seq"].as_u64()).collect();
    ensure!(seqs == (1..=seqs.len() as u64).collect::<Vec<_>>(), "{seqs:?}");
    let middle = seqs.len() / 2;
    let mut parts = world.transcript(&run, &format!("format=ndjson&until=1.{middle}")).await?;
    parts.extend(world.transcript(&run, &format!("format=ndjson&after=1.{middle}")).await?);
    ensure!(parts == whole, "two ranges are not the whole");
    let at = frames[middle]["at"].as_str().context("at")?.replace('+', "%2B");
    let mut parts = world.transcript(&run, &format!("format=ndjson&before={at}")).await?;
    parts.extend(world.transcript(&run, &format!("format=ndjson&since={at}")).await?);
    ensure!(parts == whole, "two spans of time are not the whole");
    let (status, problem) = world.call(reqwest::Method::GET, &format!("/v1/runs/{run}/transcript?format=gif"), None).await?;
    ensure!(status == StatusCode::BAD_REQUEST && problem["detail"].as_str().is_some_and(|detail| detail.contains("cast")), "{problem}");
    world.finish().await
}

#[tokio::test]
async fn who_waits_at_a_terminal_sees_steps_elapsed_time_and_bytes() -> Result<()> {
    let world = World::start().await?;
    world.agent("slow", &["/bin/sh", "-c", "echo done > $TOWPATH_RESULT_FILE; seq 1 1000; sleep 6"], json!({})).await?;
    let mut waiting = AtTerminal::start(&world, &["run", "slow", "x", "--wait"], SIZE)?;
    waiting.shows("· ").await?;
    waiting.shows(" s, 3893 bytes of output kept").await?;
    waiting.shows("succeeded, exit code 0").await?;
    ensure!(waiting.left().await?.success(), "it should have succeeded");
    // The passing line has gone.
    ensure!(!waiting.rows().iter().any(|row| row.contains("bytes of output kept")), "{:?}", waiting.rows());
    world.finish().await
}
