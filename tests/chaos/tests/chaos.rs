//! A minute of it, the same one each time.

#[tokio::test(flavor = "multi_thread")]
async fn a_minute_of_storm_loses_doubles_and_blocks_nothing() -> anyhow::Result<()> {
    let report = towpath_chaos::run(7, 60).await?;
    println!("{}", report.table);
    anyhow::ensure!(report.verdict.violations() == 0, "{}\nlogs are kept in {:?}", report.table, report.logs);
    Ok(())
}
